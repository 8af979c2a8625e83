"""Runs a step under each candidate policy, and records what it allocates and how long it takes."""
