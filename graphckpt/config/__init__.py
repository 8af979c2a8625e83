"""Config files and overrides, checked, as frozen dataclasses."""

# ruff: noqa: E402

from graphckpt.extras import require

require("train", "omegaconf", "pydantic", "yaml")

from graphckpt.config.files import LazyConfig, get_config, try_get_key
from graphckpt.config.lazy import LazyCall, instantiate

__all__ = ["LazyCall", "LazyConfig", "get_config", "instantiate", "try_get_key"]
