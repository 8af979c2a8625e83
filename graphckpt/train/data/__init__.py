"""What a run learns from: text and its tokens, data sets of one's own, and the order of samples."""

from graphckpt.train.data.map_datasets import OwnData
from graphckpt.train.data.text_data import TextData

__all__ = ["OwnData", "TextData"]
