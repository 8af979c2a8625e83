"""Finds the batch sizes that fit into a memory budget, and the plan of each."""
