"""Interactive pages: their frame, and that of a step."""
