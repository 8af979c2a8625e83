"""Trains a model through graphckpt.Graph: data, loop, hooks, metrics."""

from graphckpt.extras import require

require("train", "numpy", "safetensors", "tokenizers", "transformers")
