"""How a captured step differs from an eager one: what a step must not do in a capture, and why a capture has failed."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, final

import torch
from torch import nn

from graphckpt._compat import assert_on_device
from graphckpt.engine.call_state import get_rng_state, set_rng_state
from graphckpt.errors import GraphckptError, GraphError
from graphckpt.training_state import ModuleTree, TrainingState

# Words in the device's messages, and what they mean for the step. The first match counts.
_FIXES = (
    (("pinned", "Cannot copy between CPU and CUDA"), "it copies between host and device", "pass tensors on the device"),
    (
        ("_local_scalar_dense", ".item", "nonzero", "data-dependent", "masked_select", "unique"),
        "it reads a device value on the host",
        "keep it on the device (torch.where for an if, fixed shapes for a mask), or read it after the call",
    ),
    (
        ("legacy stream", "uncaptured work"),
        "autograd waits for a stream from before the capture",
        "drop losses from before the Graph's first call; DistributedDataParallel needs torch 2.13 or newer",
    ),
    (
        ("not permitted when stream is capturing", "StreamCapture", "stream is capturing", "captures_underway"),
        "it waits for the device, or allocates memory that a graph cannot",
        "avoid .item(), .cpu(), synchronize(), event queries and indexing with lists",
    ),
    (("generator", "philox", "RNG"), "it uses its own random generator", "use the default generator"),
)
_OURS = Path(__file__).parents[1]
_TORCH = Path(torch.__file__).parent


@final
class ModuleAttributes:
    """Module attributes at the start of a capture. A step that sets others would do so once, not on every replay.

    The same holds for a step that modifies a tensor on another device than the ``device`` of the capture.
    """

    def __init__(self, roots: Sequence[tuple[str, nn.Module]], device: torch.device | None) -> None:
        self._paths = {module: path for path, module in modules_of(roots)}
        self._elsewhere = [
            (f"{path}.{key}", value, value._version)
            for module, path in self._paths.items()
            for key, value in {**module.__dict__, **module._parameters, **module._buffers}.items()
            if isinstance(value, torch.Tensor) and _is_elsewhere(value, device)
        ]
        tree = ModuleTree(module for _, module in roots)
        self._state = TrainingState([tensor for _, tensor, _ in self._elsewhere], tree=tree, has_random=False)

    def changed(self) -> str | None:
        for module, key in self._state.changed_attributes():
            return f"{self._paths[module]}.{key}"
        return next((name for name, tensor, version in self._elsewhere if tensor._version != version), None)

    def restore(self) -> None:
        self._state.restore()


def _is_elsewhere(tensor: torch.Tensor, device: torch.device | None) -> bool:
    return device is not None and tensor.device.type not in (device.type, "meta") and not tensor.is_inference()


def modules_of(roots: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Yields every module with its path, which begins with the name of its root."""
    for root, top in roots:
        for name, module in top.named_modules():
            yield f"{root}.{name}" if name else root, module


def capture_failure(error: BaseException, roots: Sequence[tuple[str, nn.Module]]) -> str:
    first_line = str(error).strip().split("\n", 1)[0]
    where = " · ".join(_places(error, roots))
    if isinstance(error, GraphckptError):
        return first_line
    for phrases, what, fix in _FIXES:
        if any(word in str(error) for word in phrases):
            return f"{where}: {what} ({type(error).__name__}: {first_line}) · fix: {fix}"
    return f"{where}: {type(error).__name__}: {first_line} · fix: config.capture = 'eager'"


def _places(error: BaseException, roots: Sequence[tuple[str, nn.Module]]) -> Iterator[str]:
    """Yields the innermost block and the innermost line of user code in the traceback."""
    names = {id(module): path for path, module in modules_of(roots)}
    block, line = None, None
    for frame, number in traceback.walk_tb(error.__traceback__):
        owner = _owner(frame)
        if owner is not None and id(owner) in names:
            block = names[id(owner)]
        path = Path(frame.f_code.co_filename)
        if frame.f_code.co_name in ("__torch_dispatch__", "__torch_function__"):
            break  # a mode's
        if not (path.is_relative_to(_OURS) or path.is_relative_to(_TORCH)):
            line = f"{path.name}:{number} in {frame.f_code.co_name}"
    yield from (each for each in (block, line) if each is not None)
    if block is None and line is None:
        yield "in backward or the optimizer"


def _owner(frame: FrameType) -> nn.Module | None:
    owner = frame.f_locals.get("self")
    return owner if isinstance(owner, nn.Module) else None


@final
class HostRandom:
    def __init__(self) -> None:
        self._state = get_rng_state((), host=True)

    def check(self) -> None:
        """Checks that nothing was drawn since."""
        torch_state, _, host = self._state
        drawn = [] if torch.equal(torch.get_rng_state(), torch_state) else ["torch on the CPU"]
        drawn += host.changes() if host is not None else []
        if drawn:
            raise GraphError(
                f"the step draws random numbers with {' and '.join(drawn)}, which every replay would repeat · "
                "fix: draw them on the device, disable LayerDrop, or config.capture = 'eager'"
            )

    def restore(self) -> None:
        set_rng_state(self._state)


# Note [Attention masks of a capture]
# Transformers' mask code checks whether a stream is being captured, because it must not read a tensor then: it makes a
# full mask where the eager step finds that none is needed, and a mask rules out the flash kernel.

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
    """Keeps Transformers' models on the attention kernel of the eager step; see Note [Attention masks of a capture]."""

    def __init__(self) -> None:
        self._is_packed: list[bool] = []
        self._skips_padding = False

    @property
    def note(self) -> str | None:
        return _NOTE if self._skips_padding else None

    @contextmanager
    def observing(self) -> Iterator[None]:

        def packed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            indices = original(*args, **kwargs)
            self._is_packed.append(indices is not None)
            return indices

        def padded(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            skips = original(*args, **kwargs)
            mask = args[0] if args else kwargs.get("padding_mask")
            self._skips_padding |= mask is not None and bool(skips)
            return skips

        with _replaced_functions(packed, _PACKED), _replaced_functions(padded, *_PADDED):
            yield

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Repeats the decisions in the capture. If no step before had packed sequences, the device checks for them."""

        def packed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            indices = original(*args, **kwargs)
            if indices is not None:
                message = "position_ids contain packed sequences, unlike those of the steps before the capture"
                assert_on_device((indices[:, -1] == 0).all(), message)
            return None

        def tracing(original: Callable[..., Any], tensor: Any = None) -> Any:
            return tensor is not None and original(tensor)  # before Transformers 5.23 also for a missing mask

        finds_none = bool(self._is_packed) and not any(self._is_packed)
        with _replaced_functions(tracing, _TRACING), _replaced_functions(packed, *[_PACKED] if finds_none else []):
            yield


@contextmanager
def _replaced_functions(function: Callable[..., Any], *names: str) -> Iterator[None]:
    """Replaces the named functions by ``function``, which gets the original as its first argument."""
    module = sys.modules.get(_MODULE)
    originals = {name: getattr(module, name) for name in names if hasattr(module, name)}

    def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: function(original, *args, **kwargs)

    for name, original in originals.items():
        setattr(module, name, replacement(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(module, name, original)
