"""The private names of PyTorch still mean what `_compat` takes them for."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import graphckpt
from graphckpt import _compat
from graphckpt._compat import never_compiled


def test_hooks_in_force_are_the_innermost_pair() -> None:
    assert _compat.saved_tensor_hooks_in_force() is None

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    with saved_tensors_hooks(lambda t: t, lambda t: t), saved_tensors_hooks(pack, pack):
        hooks = _compat.saved_tensor_hooks_in_force()
    assert hooks is not None
    assert hooks[0] is pack
    assert _compat.saved_tensor_hooks_in_force() is None


def test_a_version_sharing_alias_sees_later_edits() -> None:
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.exp.default:
                seen.append((_compat.version_sharing_detach(out), out.detach()))
            return out

    with Mode():
        y = torch.ones(2, requires_grad=True).exp()
    shared, alone = seen[0]
    versions = shared._version, alone._version
    y.add_(1)
    assert shared._version > versions[0]
    assert alone._version == versions[1], "a plain detach() would do: version_sharing_detach can go"


def test_batch_norm_moves_its_statistics_without_a_version_bump() -> None:
    """Why buffers are compared by value on a first call; if this fails, versions would do."""
    norm = torch.nn.BatchNorm1d(2)
    version = norm.running_mean._version
    norm(torch.randn(4, 2))
    assert norm.running_mean._version == version


def test_a_hook_within_compiled_code_is_not_compiled() -> None:
    seen = []

    @never_compiled
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return looked_at(tensor)

    def looked_at(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach() * 1

    frames = CompileCounterWithBackend("eager")
    layer = nn.Linear(4, 4)  # PyTorch's own code is not compiled, but what it calls would be
    layer.compile(backend=frames)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(torch.ones(2, 4, requires_grad=True)).sum().backward()
    torch._dynamo.reset()
    assert seen
    assert frames.frame_count == 0


def test_nothing_private_is_imported_elsewhere() -> None:
    package = Path(graphckpt.__file__).parent
    allowed = {"torch.utils._python_dispatch"}  # TorchDispatchMode lives there; PyTorch documents the class
    for path in package.rglob("*.py"):
        if path.name != "_compat.py":
            found = re.findall(r"(?:from|import) (torch(?:\.\w+)*\._\w+[\w.]*)", path.read_text())
            assert set(found) <= allowed, (path.name, found)
            assert "torch._C" not in path.read_text(), path.name
