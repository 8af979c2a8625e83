"""Times what the host does for each saved tensor that is offloaded, beside the hooks of torch's `save_on_cpu`.

No device is needed: the copies are made on the CPU, or left out. All variants save the same tensors, in turns within
one process and in a new random order each turn; a ratio compares two variants of one turn. A variant's time is that of
putting all tensors, getting each in reverse order within a backward, and freeing it.

    python benchmarks/store_cost.py [--turns 30] [--numel 1024]
"""

from __future__ import annotations

import argparse
import gc
import random
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from time import process_time
from typing import Any

import torch
from report import header, spread, table, write
from torch.autograd.graph import save_on_cpu

from graphckpt.stores import Store, TensorGroup
from graphckpt.stores.host import CopyEngine, CopyEvent, HostStore
from graphckpt.stores.pinned import HostBuffer
from graphckpt.stores.tensor_store import TensorStore

COUNTS = (50, 200, 800)
A_BLOCK = 10  # tensors
GOAL = 40e-6  # seconds a tensor, at most, for 800 of them
PEER = "save_on_cpu(pin_memory=True)"


class CopiesNow(CopyEngine):
    """CopyEngine at once, or not at all; what is left is the library's own work."""

    def __init__(self, *, copies: bool) -> None:
        self._copies = copies
        self._mark: Any = object()

    def buffer(self, num_bytes: int) -> HostBuffer:
        return HostBuffer(torch.empty(num_bytes, dtype=torch.uint8), lambda: None)

    def offload(self, device_flat: torch.Tensor, host_flat: torch.Tensor, traffic: Any = None) -> CopyEvent:
        if self._copies:
            host_flat.copy_(device_flat)
        return self._mark

    def reload(self, host_flats: Any, device_flats: Any, traffic: Any = None) -> list[CopyEvent]:
        for host_flat, device_flat in zip(host_flats, device_flats, strict=True):
            if self._copies:
                device_flat.copy_(host_flat)
        return [self._mark] * len(host_flats)

    def wait(self, event: CopyEvent) -> bool:
        return True

    def wait_in_order(self, events: Any) -> None:
        pass

    def is_capturing(self) -> bool:
        return False

    def collect_times(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class InBackward(torch.autograd.Function):
    """Calls a function in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.call()
        return gradients[0], None


def within_backward(call: Callable[[], None]) -> float:
    """Returns the seconds that ``call`` takes there, without those of the backward around it."""
    seconds = 0.0

    def timed() -> None:
        nonlocal seconds
        began = process_time()
        call()
        seconds = process_time() - began

    InBackward.apply(torch.zeros(1, requires_grad=True), timed).backward()
    return seconds


def through_store(store: Store, tensors: list[torch.Tensor], own: list[torch.nn.Parameter]) -> float:
    """Puts, gets and frees ``tensors``, in blocks. Returns the seconds."""
    began = process_time()
    blocks = []
    while tensors:
        group = store.open_group(TensorGroup(f"layers.{len(blocks)}", lambda: own, print))
        keys = [store.put(tensors.pop(), group) for _ in range(min(A_BLOCK, len(tensors)))]
        store.close_group(group)
        blocks.append(keys)
    seconds = process_time() - began

    def get() -> None:
        while blocks:
            keys = blocks.pop()
            while keys:
                assert store.get(keys.pop()) is not None

    seconds += within_backward(get)
    began = process_time()
    assert not isinstance(store, TensorStore) or store.num_alive == 0  # what was freed last is given back here
    return seconds + process_time() - began


def through_hooks(hooks: save_on_cpu, tensors: list[torch.Tensor]) -> float:
    """Does the same by a pair of hooks."""
    began = process_time()
    keys = []
    while tensors:
        keys.append(hooks.pack_hook(tensors.pop()))
    seconds = process_time() - began

    def get() -> None:
        while keys:
            assert hooks.unpack_hook(keys.pop()) is not None

    return seconds + within_backward(get)


def variants() -> dict[str, Callable[[list[torch.Tensor]], float]]:
    """Returns the ways to save tensors."""
    own = [torch.nn.Parameter(torch.zeros(4)) for _ in range(12)]

    def offload(*, copies: bool) -> Callable[[list[torch.Tensor]], float]:
        place = HostStore(torch.device("cpu"), CopiesNow(copies=copies), None)
        store = TensorStore("cpu", lambda *_: place, min_elements=1)
        return lambda tensors: through_store(store, tensors, own)

    def hooks(*, pin_memory: bool) -> Callable[[list[torch.Tensor]], float]:
        pair = save_on_cpu(pin_memory=pin_memory)
        return lambda tensors: through_hooks(pair, tensors)

    return {
        "offload": offload(copies=True),
        "offload, without the copies": offload(copies=False),
        PEER: hooks(pin_memory=True),
        "save_on_cpu(), which copies nothing here": hooks(pin_memory=False),
    }


def measure(turns: int, numel: int) -> list[dict[str, Any]]:
    """Returns a row for each variant and number of tensors."""
    dice = random.Random(0)
    rows = []
    for count in COUNTS:
        ways = variants()
        seen: dict[str, list[float]] = defaultdict(list)
        for turn in range(turns + 3):  # the first step of a store has no slab, and the second makes it
            order = list(ways)
            dice.shuffle(order)
            gc.collect()
            gc.disable()
            for name in order:
                tensors = [torch.empty(numel) for _ in range(count)]
                seconds = ways[name](tensors)
                if turn >= 3:
                    seen[name].append(seconds / count)
            gc.enable()
        for name, values in seen.items():
            ratios = [a / b for a, b in zip(values, seen[PEER], strict=True)]
            rows.append(
                {"variant": name, "tensors": count, "seconds": spread(values), f"ratio to {PEER}": spread(ratios)}
            )
    return rows


def main() -> None:
    """Measures, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--numel", type=int, default=1024, help="elements of each tensor, of four bytes")
    wanted = parser.parse_args()
    head = header(turns=wanted.turns, numel=wanted.numel, tensors_in_a_block=A_BLOCK)
    rows = measure(wanted.turns, wanted.numel)
    texts = [
        [
            f"{row['variant']}, {row['tensors']} tensors",
            *(f"{row['seconds'][key] * 1e6:.1f}" for key in ("min", "median", "max")),
            f"{median(row[f'ratio to {PEER}'].values()):.2f}",
        ]
        for row in rows
    ]
    columns = ["put + get + free of a tensor, CPU time", "min us", "median us", "max us", f"x {PEER}"]
    ours = next(r for r in rows if r["tensors"] == max(COUNTS) and r["variant"] == "offload")["seconds"]["median"]
    verdict = f"Offload of {max(COUNTS)} tensors: {ours * 1e6:.1f} us each (goal: at most {GOAL * 1e6:.0f})."
    write("store_cost", head, rows, f"{table(columns, texts)}\n\n{verdict}")


if __name__ == "__main__":
    main()
