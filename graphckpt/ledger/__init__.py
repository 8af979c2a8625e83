"""The record of what a step saves, its table and its plot."""
