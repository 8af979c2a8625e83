"""Checks the guarantees of the library on a device of the user: ``graphckpt selftest``."""
