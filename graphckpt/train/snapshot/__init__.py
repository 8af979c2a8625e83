"""Saved training states: their folders and files, and resuming from one."""
