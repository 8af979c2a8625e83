"""What `selective` knows of the ops of a block: which results are kept, and what a recomputation does with each op."""
