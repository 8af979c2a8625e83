"""Keeps one slice of each tensor per rank."""
