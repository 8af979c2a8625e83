"""What a recomputation restores: values of modules and arguments, random state, autocast."""
