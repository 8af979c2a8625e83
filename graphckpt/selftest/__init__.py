"""Checks what the library promises, on a device of the user: ``graphckpt selftest``."""
