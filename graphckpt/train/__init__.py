"""Trains a model through graphckpt.Graph: data, loop, hooks, metrics."""
