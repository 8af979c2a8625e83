"""Runs one call of a recomputed block, and recomputes it in the state in which it was called."""
