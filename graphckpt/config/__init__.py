"""Config files and overrides, checked, as frozen dataclasses."""

# ruff: noqa: E402

from graphckpt.extras import require

require("train", "omegaconf", "yaml")

from graphckpt.config.instantiate import instantiate
from graphckpt.config.lazy import LazyCall, LazyConfig, try_get_key
from graphckpt.config.packaged import get_config

__all__ = ["LazyCall", "LazyConfig", "get_config", "instantiate", "try_get_key"]
