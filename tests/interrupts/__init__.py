"""KeyboardInterrupt at every moment of a step, and what the next step finds."""
