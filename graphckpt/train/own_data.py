"""The public name of :class:`OwnData`, for map-style data sets."""

from graphckpt.train.data.samples import OwnData

__all__ = ["OwnData"]
