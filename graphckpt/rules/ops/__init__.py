"""The ops of a ``selective`` block: which results are kept, and what a recomputation does with each op."""
