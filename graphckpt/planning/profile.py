"""The old path of :mod:`graphckpt.simulation.profile`, which the documentation named: it goes on, with a warning."""

from __future__ import annotations

from typing import Any

from graphckpt.deprecation import warn_deprecated
from graphckpt.simulation import profile


def __getattr__(name: str) -> Any:
    value = getattr(profile, name)
    warn_deprecated(f"{__name__}: is deprecated · fix: from {profile.__name__} import {name}")
    return value
