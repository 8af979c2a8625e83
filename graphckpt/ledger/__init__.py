"""The record of the tensors that a step saves, its table and its plot."""
