"""A recording without a device: a tape of the ops of a step, played again at the same addresses.

What makes a CUDA graph what it is holds here too: recording changes nothing, no Python of the step runs in a replay,
inputs and outputs stay where they are, and a value on the host is an error. So all that is built on recordings is
tested where there is no device. RNG state is part of the tape: graphckpt takes it and sets it between ops.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import graphckpt.engine.thread_state
from graphckpt.capture import Capture, CaptureBackend
from graphckpt.stores.host.copy_engine import CopyEngine, CopyEvent, HostBuffer


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.plays: list[Callable[[], None]] = []
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("aten._local_scalar_dense: operation not permitted when stream is capturing")
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self.remember(tensor)
        out = func(*args, **kwargs)
        results = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        held = {
            t.untyped_storage().data_ptr() for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        }
        fresh = [t.untyped_storage().data_ptr() not in held for t in results]
        args, kwargs, kept = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs, results))

        def play() -> None:
            again = [t for t in pytree.tree_leaves(func(*args, **kwargs)) if isinstance(t, torch.Tensor)]
            for static, is_fresh, value in zip(kept, fresh, again, strict=True):
                if is_fresh and static.numel():
                    static.copy_(value)

        self.plays.append(play)
        return out

    def remember(self, tensor: torch.Tensor) -> None:
        """Keeps what a storage held before the recording, to put it back."""
        storage = tensor.untyped_storage()
        if id(storage) not in self.before:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.before[id(storage)] = (whole, whole.clone())


class TapeRunner(CaptureBackend):
    name = "tape"

    def __init__(self) -> None:
        self.num_warm = 0
        self.released = 0

    def pass_on(self, output: Any) -> None:
        """There is one stream."""

    @contextmanager
    def warmup(self) -> Iterator[None]:
        self.num_warm += 1
        yield

    def capture(self, step: Callable[[], Any]) -> Capture:
        tape = Tape()
        rng_state = torch.get_rng_state()
        with taped_rng_state(tape), seen_by_transformers(), tape:
            try:
                output = step()
            finally:
                with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
                    for whole, value in tape.before.values():
                        whole.copy_(value)  # a recording does no work
                    torch.set_rng_state(rng_state)
        return TapeRecording(self, tape, output)


class TapeRecording(Capture):
    def __init__(self, runner: TapeRunner, tape: Tape, output: Any) -> None:
        self.output = output
        self._runner = runner
        self._tape: Tape | None = tape

    def replay(self) -> None:
        assert self._tape is not None
        with torch.no_grad():
            for play in self._tape.plays:
                play()

    def release(self) -> None:
        self.output = self._tape = None
        self._runner.released += 1


class TapeCopies(CopyEngine):
    """Copies by ops that a tape records; in a recording no host memory can be had, as on a device."""

    def buffer(self, num_bytes: int) -> HostBuffer:
        assert not self.is_capturing(), "memory cannot be pinned in a capture"
        return HostBuffer(torch.zeros(num_bytes, dtype=torch.uint8), lambda: None)

    def offload(self, device_flat: torch.Tensor, host_flat: torch.Tensor, traffic: Any = None) -> CopyEvent:
        host_flat.copy_(device_flat)
        return CopyEvent()

    def reload(self, host_flat: torch.Tensor, device_flat: torch.Tensor, traffic: Any = None) -> CopyEvent:
        device_flat.copy_(host_flat)
        return CopyEvent()

    def wait(self, event: CopyEvent) -> None:
        pass

    def is_on_current_stream(self, event: CopyEvent) -> bool:
        return True

    def is_capturing(self) -> bool:
        return any(isinstance(mode, Tape) for mode in _get_current_dispatch_mode_stack())

    def collect_times(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


@contextmanager
def seen_by_transformers() -> Iterator[None]:
    """Tells Transformers that a stream is captured, as CUDA does."""
    module: Any = sys.modules.get("transformers.utils.import_utils")
    if module is None:
        yield
        return
    asks = module.is_cuda_stream_capturing
    module.is_cuda_stream_capturing = lambda: True
    try:
        yield
    finally:
        module.is_cuda_stream_capturing = asks


@contextmanager
def taped_rng_state(tape: Tape) -> Iterator[None]:
    """Makes taking and setting the RNG state a part of the tape, as they are of a CUDA graph."""
    take, put = graphckpt.engine.thread_state.get_rng_state, graphckpt.engine.thread_state.set_rng_state

    def taped_take(devices: Any, *, host: bool = False) -> Any:
        state = take(devices, host=host)
        tape.plays.append(lambda: state[0].copy_(take(devices)[0]))
        return state

    def taped_set(state: Any) -> None:
        put(state)
        tape.plays.append(lambda: put(state))

    taped = {"get_rng_state": (take, taped_take), "set_rng_state": (put, taped_set)}
    users = [  # by whom they were imported
        (module, name)
        for path, module in sys.modules.items()
        for name, (own, _) in taped.items()
        if path.startswith("graphckpt.rules.") and getattr(module, name, None) is own
    ]
    for module, name in users:
        setattr(module, name, taped[name][1])
    try:
        yield
    finally:
        for module, name in users:
            setattr(module, name, taped[name][0])
