"""What a recomputation restores: values of modules and arguments, RNG state, autocast."""
