"""Say, block by block, what a training step keeps, recomputes or moves."""
