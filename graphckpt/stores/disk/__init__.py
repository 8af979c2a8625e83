"""Keeps tensors in a file."""
