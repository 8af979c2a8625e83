"""Explains in one line why a step cannot be captured: which block, which source line, and the fix."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import final

import torch
from torch import nn

from graphckpt.errors import GraphckptError
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
        """Returns the path of an attribute that has changed, or ``None``."""
        for module, key in self._state.changed_attributes():
            return f"{self._paths[module]}.{key}"
        return next((name for name, tensor, version in self._elsewhere if tensor._version != version), None)

    def restore(self) -> None:
        """Restores all attributes."""
        self._state.restore()


def _is_elsewhere(tensor: torch.Tensor, device: torch.device | None) -> bool:
    return device is not None and tensor.device.type not in (device.type, "meta") and not tensor.is_inference()


def modules_of(roots: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Yields every module with its path, which begins with the name of its root."""
    for root, top in roots:
        for name, module in top.named_modules():
            yield f"{root}.{name}" if name else root, module


def capture_failure(error: BaseException, roots: Sequence[tuple[str, nn.Module]]) -> str:
    """Returns what stopped the capture, where, and the fix."""
    said = str(error).strip().split("\n", 1)[0]
    where = " · ".join(_places(error, roots))
    if isinstance(error, GraphckptError):
        return said
    for words, what, fix in _FIXES:
        if any(word in str(error) for word in words):
            return f"{where}: {what} ({type(error).__name__}: {said}) · fix: {fix}"
    return f"{where}: {type(error).__name__}: {said} · fix: config.capture = 'eager'"


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
    yield from (found for found in (block, line) if found is not None)
    if block is None and line is None:
        yield "in backward or the optimizer"


def _owner(frame: FrameType) -> nn.Module | None:
    owner = frame.f_locals.get("self")
    return owner if isinstance(owner, nn.Module) else None
