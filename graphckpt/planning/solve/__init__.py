"""Chooses an option for each block of a measured step."""
