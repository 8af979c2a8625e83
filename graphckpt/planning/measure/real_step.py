"""Measures a user's step on the device of its model, and restores what the step has changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from graphckpt.engine.call_state import RNGState, get_rng_state, rng_devices, set_rng_state
from graphckpt.planning.budget import available_bytes
from graphckpt.planning.candidates import OpTimes, Option
from graphckpt.planning.device.write_profile import copy_rates
from graphckpt.planning.errors import PathError
from graphckpt.planning.measure.clock import StepClock, fastest, now, record_ops
from graphckpt.planning.measure.instrument import Blocks
from graphckpt.planning.measure.trace import Trace, TracedStore, traced
from graphckpt.planning.model.memory_model import StepSample
from graphckpt.stores.base import Offload, Store, TensorGroup
from graphckpt.stores.partition import ShardedStore, parse_partition, unsplit_bytes
from graphckpt.stores.placement import Placement
from graphckpt.stores.tensor_store import Piece, TensorKey, WrappedKey, pieces_of
from graphckpt.training_state import TrainingState

_TIMED_RUNS = 2  # of which the fastest counts: other load only adds time
_MOST_PATHS = 64  # runs until one calls all blocks: of 24 blocks that are dropped one time in ten, 1 in 12 does
_TIMED_COMPILED = 3  # times as many for compiled layers, whose ops cannot be timed one by one


@final
class RealStep:
    """A step function over a model, on the device of the model.

    Args:
        model: its parameters, buffers and gradients are restored afterwards.
        step_fn: runs forward and backward once, and the optimizer step, if its memory should count.
        min_elements: smaller tensors are not offloaded.
    """

    no_copies = "offload='cpu' has no effect: the tensors are in host memory already"

    def __init__(self, model: nn.Module, step_fn: Callable[[], object], *, min_elements: int = 1024) -> None:
        self._model = model
        self._step_fn = step_fn
        self._min_elements = min_elements
        tensors = list(self._model_tensors())
        self.device = next((t.device for t in tensors), torch.device("cpu"))
        self._optimizers: dict[int, Optimizer] = {}
        self._parts: dict[str, PartitionStore] = {}
        """By option: what the ranks have compared holds for blocks that save equal tensors."""
        self._copy_bytes = 0
        self._random: RNGState | None = None

    def _step(self) -> None:
        if self._random is not None:
            set_rng_state(self._random)
        self._step_fn()

    @property
    def device_name(self) -> str:
        return str(self.device)

    def copy_rates(self, target: Offload) -> tuple[float, float] | None:
        """Measures the rates; ``None`` if the model is in host memory already."""
        is_there = self.device.type == "cpu" and target.tier == "host"
        return None if is_there else copy_rates(self.device, target.tier)

    def sample(self, blocks: Blocks, options: Sequence[Option]) -> StepSample:
        """Runs the step with one option on each block: once to warm up, once traced, and a few times to time it.

        Each timed run is paired with one without policies, so that other load affects both alike.

        Raises:
            PathError: these runs call the blocks in different orders.
        """
        stores = {far: TracedStore(is_far=far, min_elements=self._min_elements) for far in (False, True)}
        parts = self._parts_of(options)

        def store_of(option: Option) -> Store | None:
            return parts[option.name] if option.is_part else stores[option.is_far]

        with on_optimizer_step(self._remember), blocks.under(options, store_of) as without:
            self._step()
            settle(parts.values(), self._step)
            trace = self._trace()
            for part in parts.values():
                part.listen(trace)
            with traced(stores.values(), trace), blocks.marked(trace), trace:
                self._step()
            far_bytes = dict(stores[True].far_bytes)
            ahead_bytes = {call: size for part in parts.values() for call, size in part.listen(None).items()}
            clocks, plain = [], []
            are_compiled = any("compile" in option.fields for option in options)
            for _ in range(_TIMED_RUNS * (_TIMED_COMPILED if are_compiled else 1)):
                clocks.append(self._timed(blocks))
                with without():
                    plain.append(self._timed(blocks))
        orders = [[call.block for call in trace.calls], *(clock.order for clock in (*clocks, *plain))]
        if any(order != orders[0] for order in orders):
            raise PathError(orders)
        total = min(clock.total for clock in plain)
        return StepSample(trace, far_bytes, fastest(clocks), total, fastest(plain), ahead_bytes)

    def _parts_of(self, options: Sequence[Option]) -> dict[str, PartitionStore]:
        names = dict.fromkeys(option.name for option in options if option.is_part)
        for option in options:
            if option.is_part and option.name not in self._parts:
                self._parts[option.name] = PartitionStore(option.fields["partition"], self._min_elements)
        return {name: self._parts[name] for name in names}

    def ops(self, blocks: Blocks) -> list[list[OpTimes]]:
        """Runs the step a few times and times each op of the blocks."""

        def run() -> None:
            for _ in range(_TIMED_RUNS):
                self._step()

        return record_ops(blocks, run, self.device)

    def repeat_longest(self, blocks: Blocks, orders: Sequence[Sequence[int]]) -> bool:
        orders = list(orders)
        for _ in range(_MOST_PATHS):
            self._random = None
            random = get_rng_state(rng_devices(self._model_tensors()), host=True)
            orders.append(self._timed(blocks).order)
            if len(set(orders[-1])) == len(blocks.names):
                self._random = random
                orders.append(self._timed(blocks).order)
                return orders[-1] == orders[-2] and all(_is_part(order, orders[-1]) for order in orders)
        return False

    def restricted_to(self, blocks: Blocks, numbers: Sequence[int]) -> AbstractContextManager[bool]:
        """Yields False: a real step runs whole, since its times are measured on many blocks."""
        del blocks, numbers
        return nullcontext(False)

    def peak(self) -> int:
        """Returns the peak of live bytes during a step.

        On CUDA it is the allocator's, with earlier allocations and temporaries of ops, but without the copies from
        which the step is restored; elsewhere it is counted as in the traced runs.
        """
        with on_optimizer_step(self._remember):
            self._step()
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
                self._step()
                return int(torch.cuda.max_memory_allocated(self.device)) - self._copy_bytes
            trace = self._trace()
            with trace:
                self._step()
        return trace.peak_bytes

    def run(self) -> tuple[int, float]:
        """Runs the step with the policies that its model has; returns the peak in bytes and the seconds."""
        return self.peak(), min(self._seconds() for _ in range(_TIMED_RUNS))

    def _seconds(self) -> float:
        begin = now(self.device)
        self._step()
        return now(self.device) - begin

    def available_bytes(self, static: int) -> int:
        """Returns the free memory of the device, and the ``static`` bytes that the step holds already."""
        return available_bytes(self.device, static)

    def restoring(self) -> AbstractContextManager[None]:
        """Restores parameters, buffers, gradients, optimizers and random state at the end."""
        return self.excluding_copies(self._restoring())

    @contextmanager
    def excluding_copies(self, restoring: AbstractContextManager[None]) -> Iterator[None]:
        """Enters ``restoring``; what that allocates, to restore the step at its end, is not counted in peaks within."""
        with ExitStack() as stack:
            with self._copying():
                stack.enter_context(restoring)
            yield
        self._copy_bytes = 0

    @contextmanager
    def _copying(self) -> Iterator[None]:
        before = self._allocated_bytes()
        yield
        self._copy_bytes += self._allocated_bytes() - before

    def _allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    @contextmanager
    def _restoring(self) -> Iterator[None]:
        state = TrainingState(self._model_tensors())
        gradients = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in self._model.parameters()]

        def add(optimizer: Optimizer) -> None:
            with self._copying():
                state.add(optimizer)

        try:
            with on_optimizer_step(add):
                yield
        finally:
            with torch.no_grad():
                for parameter, grad, old in gradients:
                    parameter.grad = grad
                    if grad is not None and old is not None:
                        grad.copy_(old)
            state.restore()

    def _remember(self, optimizer: Optimizer) -> None:
        self._optimizers[id(optimizer)] = optimizer

    def _trace(self) -> Trace:
        trace = Trace(self.device.type, rounded=_rounded_on_cuda if self.device.type == "cuda" else None)
        state = [
            v
            for o in self._optimizers.values()
            for s in o.state.values()
            for v in s.values()
            if isinstance(v, torch.Tensor)
        ]
        gradients = [p.grad for p in self._model.parameters()]
        trace.track([*self._model_tensors(), *gradients, *state])
        return trace

    def _timed(self, blocks: Blocks) -> StepClock:
        clock = StepClock(self.device)
        with blocks.marked(clock):
            self._step()
        clock.stop()
        return clock

    def _model_tensors(self) -> Iterable[torch.Tensor]:
        yield from self._model.parameters()
        yield from self._model.buffers()


def _is_part(order: Sequence[int], longest: Sequence[int]) -> bool:
    rest = iter(longest)
    return all(block in rest for block in order)


@contextmanager
def on_optimizer_step(see: Callable[[Optimizer], None]) -> Iterator[None]:
    """Calls ``see`` with each optimizer before it steps."""
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: see(optimizer))
    try:
        yield
    finally:
        hook.remove()


def _rounded_on_cuda(num_bytes: int) -> int:
    return -(-num_bytes // 512) * 512  # what CUDA's caching allocator hands out


_MOST_RUNS = 3  # of a step that keeps something new each time


@final
class PartitionStore(Store):
    """Partitions saved tensors, with a store for each block, and records in a trace what blocks hold whole.

    A step under a plan has one store for all such blocks, which prefetches the parts of the next block while a block's
    backward runs. Here each block has its own, so that a trace shows what the block alone does;
    :func:`~graphckpt.planning.model.memory_model.with_gathers` then adds what is prefetched.

    Args:
        partition: a value of the flag ``partition``.
        min_elements: smaller tensors are not partitioned.
    """

    label = "part"

    def __init__(self, partition: Any, min_elements: int = 1024) -> None:
        self._partition = parse_partition(partition)
        self._min_elements = min_elements
        self._stores: dict[str, Store] = {}
        self._trace: Trace | None = None
        self._ahead_bytes: dict[int, int] = {}
        self.has_compared = False
        """Whether a tensor was kept whole until the ranks had compared it; they do so once for equal tensors."""

    def listen(self, trace: Trace | None) -> dict[int, int]:
        """Records in ``trace`` from now on; ``None`` stops recording.

        Returns, by the number of a call, the bytes that were recorded for the all-gather of its parts.
        """
        self._trace = trace
        found, self._ahead_bytes = self._ahead_bytes, {}
        return found

    def open_group(self, group: TensorGroup) -> TensorGroup | None:
        if group.block not in self._stores:
            self._stores[group.block] = Placement(None, self._partition, min_elements=self._min_elements).store
        return self._stores[group.block].open_group(group)

    def put(self, tensor: torch.Tensor, group: TensorGroup | None) -> object:
        assert group is not None
        store = self._stores[group.block]
        return _PartitionKey(store, store.put(tensor, group), self._trace)

    def get(self, key: object) -> torch.Tensor | None:
        assert isinstance(key, _PartitionKey)
        return key.store.get(key.key)

    def close_group(self, group: TensorGroup | None) -> None:
        """Closes the group."""
        assert group is not None
        num_whole = len(_pieces(group, is_cut=False))
        with warnings.catch_warnings():  # an option that partitions little shows in its bytes
            warnings.filterwarnings("ignore", message=".*already sharded, left whole")
            self._stores[group.block].close_group(group)
        self.has_compared |= len(_pieces(group, is_cut=False)) < num_whole
        cut = _pieces(group, is_cut=True)
        sizes = [
            piece.store.gathered_bytes(piece.handle.num_bytes) for piece in cut if isinstance(piece.store, ShardedStore)
        ]
        if len(sizes) > 1:
            sizes.append(sum(piece.store.stored_bytes(piece.handle.num_bytes) for piece in cut))  # as one buffer
        if sizes and self._trace is not None:
            call = len(self._trace.calls) - 1
            self._ahead_bytes[call] = self._ahead_bytes.get(call, 0) + sum(sizes)


def settle(stores: Collection[PartitionStore], step: Callable[[], object]) -> None:
    """Runs a step until the ranks have compared all of its tensors; they do so equally often."""
    for _ in range(_MOST_RUNS):
        if not any(store.has_compared for store in stores):
            break
        for store in stores:
            store.has_compared = False
        step()


def _pieces(group: TensorGroup, *, is_cut: bool) -> list[Piece]:
    return [piece for piece in pieces_of(group) if (unsplit_bytes(piece.handle) is None) == is_cut]


@final
class _PartitionKey:
    """A key, and the tensors that its block holds whole."""

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
    """Yields the tensors of a key that are not partitioned."""
    if isinstance(key, torch.Tensor):
        yield key
    elif isinstance(key, WrappedKey):
        for inner in key.keys:
            yield from _whole(inner)
    elif isinstance(key, TensorKey):
        whole = unsplit_bytes(key.piece.handle)
        if whole is not None:
            yield whole
