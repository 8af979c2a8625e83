"""Training data: text and its tokens, user-defined data sets, and the order of samples."""

from graphckpt.train.data.samples import OwnData
from graphckpt.train.data.text_data import TextData

__all__ = ["OwnData", "TextData"]
