"""Keeps tensors in one slab on their device."""
