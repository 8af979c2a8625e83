"""What a step takes where blocks keep parts: the real store runs in the logged runs, block by block.

A step under a plan has one store for all such blocks, which sends for the next block's parts while a block's backward
runs. In the logged runs each block has a store of its own, so that what a block does shows alone; :func:`with_gathers`
then adds what is on its way ahead of time::

    backward of   3         2         1      of these 3 and 1 keep parts
    on its way    [ 1's ------------- ]
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist

from graphckpt.errors import ConfigError
from graphckpt.planning.program import Run
from graphckpt.planning.trace import Interval, Phase
from graphckpt.planning.walk import Steps
from graphckpt.stores import Group, Placement, Store, parse_partition
from graphckpt.stores.partition.sharded import ShardedStore, whole_bytes
from graphckpt.stores.storage_pieces import TensorKey, WrappedKey, pieces_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from graphckpt.planning.agree import Team
    from graphckpt.planning.measured import Measured
    from graphckpt.planning.run import Option
    from graphckpt.planning.trace import Trace
    from graphckpt.stores.storage_pieces import Piece

_MOST_RUNS = 3  # of a step that keeps something new each time


def parted(options: Sequence[Option], partition: Any) -> tuple[Option, ...]:
    """Returns options, and behind them those that stay on their device with what they keep cut over ranks."""
    parts = [
        replace(o, name=f"{o.name} + part", fields={**o.fields, "partition": partition}, is_part=True)
        for o in options
        if not o.is_far
    ]
    return (*options, *parts)


def asked(partition: Any, team: Team) -> tuple[Any, list[str]]:
    """Returns the ranks that kept tensors may be cut over, ``None`` if there are none, and what there is to note.

    Raises:
        ConfigError: the flag names no ranks, or they would not plan together.
    """
    if parse_partition(partition) is None:
        return None, []
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None, ["partition does nothing here: there is one process"]
    if team.size == 1:
        raise ConfigError("partition: the ranks that share tensors have to plan together · fix: leave `group` out")
    return partition, []


@final
class PartStore(Store):
    """Keeps parts, in a store of its own for each block, and tells a trace what blocks hold whole.

    Args:
        partition: the ranks, as the flag ``partition`` takes them.
        min_elements: smaller tensors stay.
    """

    label = "part"

    def __init__(self, partition: Any, min_elements: int = 1024) -> None:
        self._partition = parse_partition(partition)
        self._min_elements = min_elements
        self._stores: dict[str, Store] = {}
        self._trace: Trace | None = None
        self._ahead_bytes: dict[int, int] = {}
        self.has_asked = False
        """Whether something was kept whole until the ranks had been asked; they are not when the same is kept again."""

    def listen(self, trace: Trace | None) -> dict[int, int]:
        """Has a trace told from now on, or nobody.

        Returns what was found until now: by the number of a call, the bytes that a gather of its parts takes until they
        are used.
        """
        self._trace = trace
        found, self._ahead_bytes = self._ahead_bytes, {}
        return found

    def open_group(self, group: Group) -> Group | None:
        """Begins what one call keeps."""
        if group.block not in self._stores:
            self._stores[group.block] = Placement(None, self._partition, min_elements=self._min_elements).store
        return self._stores[group.block].open_group(group)

    def put(self, tensor: torch.Tensor, group: Group | None) -> object:
        """Keeps ``tensor`` and returns the key to it."""
        assert group is not None
        store = self._stores[group.block]
        return _Kept(store, store.put(tensor, group), self._trace)

    def get(self, key: object) -> torch.Tensor | None:
        """Returns the kept tensor."""
        assert isinstance(key, _Kept)
        return key.store.get(key.key)

    def close_group(self, group: Group | None) -> None:
        """Nothing more comes into the group."""
        assert group is not None
        num_whole = len(_pieces(group, is_cut=False))
        with warnings.catch_warnings():  # that an option cuts little shows in its bytes
            warnings.filterwarnings("ignore", message=".*already sharded, left whole")
            self._stores[group.block].close_group(group)
        self.has_asked |= len(_pieces(group, is_cut=False)) < num_whole
        cut = _pieces(group, is_cut=True)
        sizes = [
            piece.store.gathered_bytes(piece.handle.num_bytes) for piece in cut if isinstance(piece.store, ShardedStore)
        ]
        if len(sizes) > 1:
            sizes.append(sum(piece.store.stored_bytes(piece.handle.num_bytes) for piece in cut))  # as one, to be sent
        if sizes and self._trace is not None:
            call = len(self._trace.calls) - 1
            self._ahead_bytes[call] = self._ahead_bytes.get(call, 0) + sum(sizes)


def learn(stores: Collection[PartStore], step: Callable[[], object]) -> None:
    """Runs a step until nothing waits whole in it any more for the ranks to be asked; all of them see the same."""
    for _ in range(_MOST_RUNS):
        if not any(store.has_asked for store in stores):
            break
        for store in stores:
            store.has_asked = False
        step()


def _pieces(group: Group, *, is_cut: bool) -> list[Piece]:
    return [piece for piece in pieces_of(group) if (whole_bytes(piece.handle) is None) == is_cut]


@final
class _Kept:
    """A key, and what its block holds whole by it."""

    __slots__ = ("__weakref__", "_held", "_trace", "key", "store")

    def __init__(self, store: Store, key: object, trace: Trace | None) -> None:
        self.store = store
        self.key = key
        self._trace = trace
        self._held = [] if trace is None else [trace.hold(tensor) for tensor in _whole(key)]

    def __del__(self) -> None:
        for held in self._held:
            assert self._trace is not None
            self._trace.release(held)


def _whole(key: object) -> Iterator[torch.Tensor]:
    """Yields what stays as it is, of all that a key means."""
    if isinstance(key, torch.Tensor):
        yield key
    elif isinstance(key, WrappedKey):
        for inner in key.keys:
            yield from _whole(inner)
    elif isinstance(key, TensorKey):
        whole = whole_bytes(key.piece.handle)
        if whole is not None:
            yield whole


def with_gathers(
    measured: Measured, plan: Sequence[int], joined: Mapping[Interval, Sequence[Steps]]
) -> Mapping[Interval, Sequence[Steps]]:
    """Returns what happens in some intervals, with the gathers that begin one block ahead of their use.

    Args:
        measured: the step.
        plan: the option of each block.
        joined: what happens there as it is.
    """
    model, ahead = measured.model, measured.ahead_bytes
    if not ahead:
        return joined
    found = dict(joined)
    before: Interval | None = None
    for interval in model.intervals:
        if interval.phase is not Phase.BACKWARD:
            continue
        option = plan[model.block_of_call[interval.call]]
        num_bytes = ahead.get((interval.call, option), 0)
        if not num_bytes:
            continue
        if before is not None:
            own = found.get(before) or [model.steps(before, plan[model.block_of_call[before.call]])]
            found[before] = [model.steps_of([Run(num_bytes, num_bytes)]), *own]
            own = found.get(interval) or [model.steps(interval, option)]
            found[interval] = [model.steps_of([Run(0, -num_bytes)]), *own]
        before = interval
    return found
