"""Saved training states: their folders, what is in them, and how a run goes on from one."""
