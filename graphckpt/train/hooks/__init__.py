"""The trainer's hooks, one file each."""
