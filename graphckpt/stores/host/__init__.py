"""Keeps tensors in pinned host memory."""
