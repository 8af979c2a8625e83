"""Faults planted in graphckpt, each in a named place, are seen: a device that shows none of them would prove nothing.

A place that is not there any more is an error: the fault must then be planted anew, not left out.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from graphckpt.errors import GraphckptError
from graphckpt.graph import capture
from graphckpt.graph.capture import CudaGraphBackend, _CapturedCudaGraph
from graphckpt.stores import Host, TensorGroup
from graphckpt.stores.disk import Transfer
from graphckpt.stores.host import CopyEngine, HostStore
from graphckpt.stores.slab import SlabStore
from simulated_cuda.library import call, load, use_schedule
from simulated_cuda.steps import D, Train, bits_of_steps, is_same

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

SCHEDULES = ["lazy", *(f"random:{seed}" for seed in range(4)), "eager"]


# --- what shows faults: each returns whether all is right, and raises where the device does


def steps_with(store: str, *, is_captured: bool = False) -> Callable[[], bool]:
    return lambda: is_same(bits_of_steps("keep", store, is_captured=is_captured), plain_bits())


@cache
def plain_bits() -> list[torch.Tensor]:
    """Of the plain step, where nothing is offloaded and no fault shows."""
    return bits_of_steps()


class WithHead(Train):
    """Has a block that takes no part in the loss."""

    def build(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.model[:-1]:
            x = block(x)
        self.model[-1](x)
        loss = x.square().mean()
        loss.backward()
        return loss


def with_a_head_outside_of_the_loss() -> bool:
    def losses(store: str, capture: str) -> list[torch.Tensor]:
        graph = WithHead("keep", "device", capture)
        if store != "device":
            graph.model[-1].config.update({"offload": True, "min_elements": 1})
        generator = torch.Generator().manual_seed(1)
        torch.manual_seed(5)
        rows = (8, 8, 8, 8, 8, 4)  # the last step is eager, after replays
        return [graph(torch.randn(n, D, generator=generator).cuda()).cpu() for n in rows]

    return is_same(losses("offload", "cuda_graph"), losses("device", "eager"))


def prefetched_in_vain() -> bool:
    """Frees what is on its way back; its memory goes to the next tensor."""
    store = Host(in_flight_bytes=0).byte_store_for(torch.device("cuda", 0), print)
    assert store is not None
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for seed in range(10):
        store.begin_step()
        group = TensorGroup("block", list, print)
        group.number = 0
        handle = store.put(torch.full((4096,), seed, dtype=torch.uint8, device="cuda"), group)
        store.close_group(group)
        store.prefetch([handle], group)
        store.free(handle)
        other = torch.full((4096,), 100, dtype=torch.uint8, device="cuda")
        torch.cuda.current_stream().synchronize()
        torch.cuda.synchronize()
        wrong += (other != 100).sum()
    store.close()
    return not wrong.item()


def one_of_two_graphs_is_released() -> bool:
    """What it leaves behind goes to the next tensors, to which a replay of the other must not write."""
    backend = CudaGraphBackend(torch.device("cuda", 0))

    def product() -> torch.Tensor:
        x = torch.ones(8, 8, device="cuda")
        return x @ x

    with backend.warmup():
        product()
    first, second = backend.capture(product), backend.capture(product)
    first.release()
    with backend.warmup():  # on the stream of the captures
        others = [torch.zeros(128, device="cuda") for _ in range(8)]
    second.replay()
    return not any(bool(other.any()) for other in others)


# --- faults


class NeverRecorded(torch.cuda.Event):
    """Waits for it are no waits."""

    def record(self, stream: Any = None) -> None:
        pass


class RecordedOnce(torch.cuda.Event):
    """Stays where it was recorded first."""

    is_recorded = False

    def record(self, stream: Any = None) -> None:
        if not self.is_recorded:
            self.is_recorded = True
            super().record(stream)


FAULTS: dict[str, tuple[list[Any], Callable[[], bool]]] = {}
"""For each, the places that are replaced, and what then goes wrong under some schedule."""


def fault(name: str, check: Callable[[], bool], owner: Any, method: str) -> Callable[[Callable[..., Any]], None]:
    """Registers a function that takes the place of a method, which comes first among its arguments."""
    original = getattr(owner, method)

    def register(function: Callable[..., Any]) -> None:
        places, _ = FAULTS.setdefault(name, ([], check))
        places.append((owner, method, lambda *args: function(original, *args)))

    return register


EVENTS = {"a copy does not wait for the step": NeverRecorded, "a fork event is recorded once": RecordedOnce}
for name, kind in EVENTS.items():

    @fault(name, steps_with("offload"), CopyEngine, "_issue")
    def _(original: Any, self: Any, *arguments: Any, event: type[torch.cuda.Event] = kind) -> Any:
        assert isinstance(self._fork, torch.cuda.Event)
        if not isinstance(self._fork, event):
            self._fork = event()
        return original(self, *arguments)


@fault("a wait for a copy is left out", steps_with("offload"), CopyEngine, "wait")
def _(original: Any, self: Any, event: Any) -> bool:
    recorded, event.event = event.event, None
    if recorded is not None:
        self._idle.append(recorded)
    return True


@fault("a source is released early", steps_with("offload, nothing in flight"), CopyEngine, "wait_in_order")
def _(original: Any, self: Any, events: Any) -> None:
    self._idle += [event.event for event in events if event.event is not None]


@fault("a reload is used early", steps_with("offload, nothing in flight"), HostStore, "_drop_reload")
def _(original: Any, self: Any, handle: Any) -> bool:
    self._reloading.pop(handle, None)
    handle.reload_buffer = handle.reload_event = None
    return True


@fault("memory is freed without a wait", prefetched_in_vain, HostStore, "free")
def _(original: Any, self: Any, handle: Any) -> None:
    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(CopyEngine, "wait", lambda *arguments: True)
        original(self, handle)


for owner, name in ((HostStore, "_wait_all"), (CudaGraphBackend, "_join_copies")):
    unjoined = fault("copies are not joined at the end of backward", with_a_head_outside_of_the_loss, owner, name)
    unjoined(lambda *_: None)


@fault("a captured event is waited for in an eager step", with_a_head_outside_of_the_loss, CopyEngine, "wait")
def _(original: Any, self: Any, event: Any) -> Any:
    event.is_captured = self.is_capturing()
    return original(self, event)


@fault("a range of the slab is freed early", steps_with("slab"), SlabStore, "put")
def _(original: Any, self: Any, data: torch.Tensor, group: Any) -> Any:
    handle = original(self, data, group)
    begin, end, _ = self._in_use[max(self._in_use)]
    self._ranges.free(begin, end)  # for the next tensor
    return handle


@fault("a range of the slab is freed early", steps_with("slab"), SlabStore, "_free_dropped")
def _(original: Any, self: Any) -> None:
    self._free.clear()


@fault("a write to disk does not wait for the step", steps_with("disk"), Transfer, "mark")
def _(original: Any, self: Any) -> torch.cuda.Event:
    return NeverRecorded()


@fault("a chunk is used before the copy", steps_with("disk"), Transfer, "_copy")
def _(original: Any, self: Any, target: torch.Tensor, source: torch.Tensor, ready: torch.cuda.Event) -> None:
    with torch.cuda.stream(self._stream):
        self._stream.wait_event(ready)
        target.copy_(source, non_blocking=True)


@fault("a warm-up does not wait", steps_with("device", is_captured=True), CudaGraphBackend, "warmup")
@contextlib.contextmanager
def _(original: Any, self: Any) -> Any:
    """Also of the first replay: the warm-up runs on the stream of the capture."""
    with torch.cuda.stream(self._stream):
        yield


@fault("a replay is not joined", steps_with("device", is_captured=True), _CapturedCudaGraph, "replay")
def _(original: Any, self: Any) -> None:
    with torch.cuda.stream(self._stream):
        self._graph.replay()


@fault("captures share cuBLAS's workspace", one_of_two_graphs_is_released, capture, "clear_cublas_workspaces")
def _(original: Any) -> None:
    pass


def is_right(check: Callable[[], bool]) -> bool:
    try:
        result = check()
        torch.cuda.synchronize()
    except (AttributeError, TypeError, NameError, AssertionError):
        raise  # of the fault itself: what it replaces is not there any more
    except (RuntimeError, GraphckptError):
        return False
    return result


def settle() -> None:
    """Ends what a fault has left behind."""
    load().captures_abort()
    torch.cuda.set_stream(torch.cuda.default_stream())
    gc.collect()
    for _ in range(3):
        with contextlib.suppress(torch.AcceleratorError):
            call("synchronize_all")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str) -> None:
    places, check = FAULTS[fault]
    plain_bits()
    schedules = []
    for schedule in SCHEDULES:
        use_schedule(schedule)
        with pytest.MonkeyPatch.context() as patch:
            for place in places:
                patch.setattr(*place)
            if not is_right(check):
                schedules.append(schedule)
        settle()
    assert schedules, "no schedule has shown it"
    use_schedule("lazy")
    assert is_right(check), "without the fault"
