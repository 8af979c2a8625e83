"""Where kept bytes live: one file per place."""

from graphckpt.stores.base import Store
from graphckpt.stores.device import DeviceStore

__all__ = ["DeviceStore", "Store"]
