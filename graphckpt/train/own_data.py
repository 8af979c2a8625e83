"""The public name of :class:`OwnData`, for data sets of one's own."""

from graphckpt.train.data.samples import OwnData

__all__ = ["OwnData"]
