"""Keeps Transformers' models on the attention kernel of the eager step during a capture.

Their mask code checks whether a stream is being captured, because it must not read a tensor then: it makes a full mask
where the eager step finds that none is needed, and a mask rules out the flash kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

from graphckpt._compat import assert_on_device

_MODULE = "transformers.masking_utils"
_PACKED = "find_packed_sequence_indices"  # None: every row is one sequence
_TRACING = "is_tracing"  # of a tensor: whether its values must not be read
_PADDED = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")  # True: the mask is all ones
_NOTE = (
    "Transformers makes the attention mask in every captured step, as it cannot check whether it is all ones "
    "(fix: pass no attention_mask for batches without padding)"
)


@final
class AttentionMasks:
    """The decisions of the mask code in the steps before a capture."""

    def __init__(self) -> None:
        self._is_packed: list[bool] = []
        self._skips_padding = False

    @property
    def note(self) -> str | None:
        """How the capture differs from the eager step, if it does."""
        return _NOTE if self._skips_padding else None

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Observes a step before the capture."""

        def packed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            self._is_packed.append(found is not None)
            return found

        def padded(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            skips = original(*args, **kwargs)
            mask = args[0] if args else kwargs.get("padding_mask")
            self._skips_padding |= mask is not None and bool(skips)
            return skips

        with _instead(packed, _PACKED), _instead(padded, *_PADDED):
            yield

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Repeats the decisions in the capture. If no step before had packed sequences, the device checks for them."""

        def packed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            if found is not None:
                message = "position_ids contain packed sequences, unlike those of the steps before the capture"
                assert_on_device((found[:, -1] == 0).all(), message)
            return None

        def tracing(original: Callable[..., Any], tensor: Any = None) -> Any:
            return tensor is not None and original(tensor)  # before Transformers 5.23 also for a missing mask

        finds_none = bool(self._is_packed) and not any(self._is_packed)
        with _instead(tracing, _TRACING), _instead(packed, *[_PACKED] if finds_none else []):
            yield


@contextmanager
def _instead(function: Callable[..., Any], *names: str) -> Iterator[None]:
    """Replaces the named functions by ``function``, which gets the original as its first argument."""
    module = sys.modules.get(_MODULE)
    found = {name: getattr(module, name) for name in names if hasattr(module, name)}

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: function(original, *args, **kwargs)

    for name, original in found.items():
        setattr(module, name, around(original))
    try:
        yield
    finally:
        for name, original in found.items():
            setattr(module, name, original)
