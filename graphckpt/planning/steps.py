"""Steps that can be measured: a user's on the device of its model, and one on fake tensors for an absent device."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import nn
from torch.optim import Optimizer

from graphckpt._compat_memory import gradient_buckets
from graphckpt.budget import Budget
from graphckpt.errors import ConfigError
from graphckpt.ledger.live_memory import LiveBytes
from graphckpt.planning.candidates import Option
from graphckpt.planning.intervals import Interval, LevelLog, Phase, StepReadings
from graphckpt.planning.level_meter import LevelMeter, level_counter
from graphckpt.planning.measured_step import StepSample
from graphckpt.planning.measured_stores import PartitionStore, SimulatedStore, metered, settle
from graphckpt.planning.op_levels import OpTimes, record_ops
from graphckpt.planning.options import DeviceMemory, absent_memory, device_memory
from graphckpt.planning.step_clock import NO_BLOCKS, Blocks, PathError, StepClock
from graphckpt.reached import Restore, StepReach, check_restore, model_of, reached_by
from graphckpt.simulation.allocations import (
    AllocationLog,
    AllocationTrace,
    OpSeconds,
    Replay,
    fits,
    least_capacity,
    replay,
)
from graphckpt.simulation.allocator import AllocatorRules, CapacityError, up_to_blocks
from graphckpt.simulation.assumptions import StepObserver
from graphckpt.simulation.fake_device import FakeDevice
from graphckpt.simulation.op_costs import OpCost
from graphckpt.simulation.stand_ins import StandIns
from graphckpt.simulation.timeline import StepSeconds
from graphckpt.simulation.write_profile import copy_rates
from graphckpt.stores.base import Offload
from graphckpt.thread_state import RNGState, get_rng_state, rng_devices, set_rng_state
from graphckpt.training_state import ModuleTree, TrainingState, on_optimizer_step
from graphckpt.tree import storages_of
from graphckpt.undo import Scope, Undo, enter, scope

_HOST = torch.device("cpu")  # of fake tensors
_CUBLAS_HANDLES = "forward", "backward"  # threads; each has a handle, and a handle a workspace for the stream
_TIMED_RUNS = 2  # of which the fastest counts: other load only adds time
_MOST_PATHS = 64  # runs until one calls all blocks: of 24 blocks that are dropped one time in ten, 1 in 12 does
_LEAST_SHARE = 2000  # of a limit: each replay of a large step takes a second
ENOUGH = 0.98  # of a limit: how far below it the least memory of a plan is, is not searched
_TIMED_COMPILED = 3  # times as many for compiled layers, whose ops cannot be timed one by one


class StepRun(NamedTuple):
    """The memory and the time of a step under the policies that were set when it ran."""

    levels: LevelLog
    """Live bytes, by interval."""
    seconds: float
    allocations: AllocationLog | None = None
    """Allocations of the first steps of a process, or on CUDA of two steps; ``None`` for a step on a CPU."""
    communication_seconds: float = 0.0
    exposed_seconds: float = 0.0
    """The share of ``seconds`` in which computation waits for collectives."""
    bubble_seconds: float = 0.0
    """The share of ``seconds`` in which a pipeline stage waits for others. All three are 0 for a real step, where they
    are not known."""

    @property
    def peak_bytes(self) -> int:
        return peak_of(self.levels)


def peak_of(levels: LevelLog) -> int:
    return max(span.peak for span in levels.values())


class RealStep:
    """A user's step on the device of its model."""

    is_simulated = False
    world_size, rank = 1, 0
    assumptions: tuple[str, ...] = ()
    no_copies = "offload='cpu' has no effect: the tensors are in host memory already"

    def __init__(
        self, model: nn.Module, step_fn: Callable[[], object], restore: Restore = None, where: str = "plan"
    ) -> None:
        self._model = model
        self._step_fn = step_fn
        self._restore = restore
        self._where = where
        self.device = next((t.device for t in self._model_tensors()), torch.device("cpu"))
        self.device_name = str(self.device)
        self._optimizers: dict[Optimizer, None] = {}
        self._parts: dict[str, PartitionStore] = {}
        """By option; each stores which tensors the ranks have compared, for all blocks that save equal ones."""
        self._copy_bytes = 0
        self._reach: Callable[[], StepReach] | None = None
        self._first_reached: list[torch.Tensor] = []
        """The tensors that :attr:`_reach` found before the first step; they are held until they are restored."""
        self._start_bytes: int | None = None
        """The level at the start of the first step that was sampled."""
        self.reserved_bytes = 0
        """The most that the allocator reserved in the last step whose peak was measured on CUDA."""
        self._random: RNGState | None = None
        # Not a method: a counter holds it as long as tensors that it has seen are alive, and must not hold the step.
        self.rounded: Callable[[int], int] = up_to_blocks if self.device.type == "cuda" else int
        """Returns the bytes that the allocator of the device counts for a size."""
        self.before_step: Callable[[], object] = int
        """Called before each run of the step, outside of the timed code."""

    def _step(self) -> None:
        self.before_step()
        self._run_step()

    def _run_step(self) -> None:
        if self._random is not None:
            set_rng_state(self._random)
        self._step_fn()

    def copy_rates(self, target: Offload) -> tuple[float, float] | None:
        """Measures the rates; ``None`` if the model is in host memory already."""
        is_there = self.device.type == "cpu" and target.tier == "host"
        return None if is_there else copy_rates(self.device, target.tier)

    def sample(self, blocks: Blocks, options: Sequence[Option]) -> StepSample:
        """Runs the step with one option on each block: to warm up, to read levels, and a few times to time it.

        Each timed run is paired with one without policies, so that other load affects both alike.
        """
        store = SimulatedStore(_far_blocks(blocks, options))
        parts = self._parts_of(options)
        stores = [parts[option.name] if option.is_partitioned else store for option in options]
        # In this order: the first step creates optimizer states and lets blocks learn what moves; ranks compare what
        # they partition, and keep it in full until they have; from then on each step is like the next. Times are taken
        # apart from levels, as a counter slows a step down.
        with on_optimizer_step(self._optimizers.setdefault), blocks.under(options, stores) as without:
            self._step()
            settle(parts.values(), self._step)
            meter = self.new_meter()
            with metered(blocks, meter, stores):
                self._step()
            levels = self._from_first_start(meter.result())
            clocks, plain = [], []
            are_compiled = any("compile" in option.fields for option in options)
            for _ in range(_TIMED_RUNS * (_TIMED_COMPILED if are_compiled else 1)):
                clocks.append(self._timed(blocks))
                with without():
                    plain.append(self._timed(blocks))
        runs = (meter, *clocks, *plain)
        orders = [each.order for each in runs]
        if any(order != orders[0] for order in orders):
            nested = next(((blocks.names[a], blocks.names[b]) for a, b in filter(None, (r.nested for r in runs))), None)
            raise PathError(orders, nested)
        total = min(clock.total for clock in plain)
        return StepSample(levels, levels.peak_bytes, _fastest(clocks), total, _fastest(plain))

    def _from_first_start(self, levels: StepReadings) -> StepReadings:
        """Returns levels of the allocator as if the step began with what the first one began with.

        The allocator counts tensors that the step does not use. What is freed of them from one step to another must not
        seem to be due to an option. The copies from which the step is restored do not count.
        """
        if self.device.type != "cuda":
            return levels
        if self._start_bytes is None:
            self._start_bytes = levels.start_bytes - self._own_bytes()
        return replace(levels, start_bytes=self._start_bytes)

    def _parts_of(self, options: Sequence[Option]) -> dict[str, PartitionStore]:
        listed = {option.name: option.fields["partition"] for option in options if option.is_partitioned}
        self._parts |= {name: PartitionStore(ranks) for name, ranks in listed.items() if name not in self._parts}
        return {name: self._parts[name] for name in listed}

    def ops(self, blocks: Blocks) -> list[list[OpTimes]]:
        def run() -> None:
            for _ in range(_TIMED_RUNS):
                self._step()

        return record_ops(blocks, run, self.device)

    def repeat_longest(self, blocks: Blocks, orders: Sequence[Sequence[int]]) -> bool:
        """Lets all later runs draw the random numbers of one that calls all blocks; returns whether there is one.

        ``orders`` are those in which runs have called blocks, which must leave out calls of that one.
        """
        orders = list(orders)
        for _ in range(_MOST_PATHS):
            self._random = None
            random = get_rng_state(rng_devices(self._model_tensors()), host=True)
            orders.append(self._timed(blocks).order)
            if len(set(orders[-1])) == len(blocks.names):
                self._random = random
                orders.append(self._timed(blocks).order)
                rests = [(iter(orders[-1]), order) for order in orders]  # each of them a subsequence of the last one?
                return orders[-1] == orders[-2] and all(block in rest for rest, order in rests for block in order)
        return False

    def levels(self, blocks: Blocks = NO_BLOCKS) -> LevelLog:
        """Returns the live bytes during a step, by interval.

        On CUDA they are the allocator's, with earlier allocations and temporaries of ops, but without the copies from
        which the step is restored; elsewhere they are counted op by op.
        """
        with on_optimizer_step(self._optimizers.setdefault):
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # what is reserved from here on is due to this step
            # The first step reserves what this one needs, the second is measured: its states and gradients exist.
            self._step()
            meter = self.new_meter()
            with meter.metering(blocks):
                self._step()
            own_bytes = self._own_bytes()
        self.reserved_bytes = meter.reserved_bytes - own_bytes
        return meter.levels(own_bytes)

    def allocations(self) -> AllocationLog | None:
        """Runs two steps, and logs their allocations after those that the process has; ``None`` if not on CUDA."""
        if self.device.type != "cuda":
            return None
        with on_optimizer_step(self._optimizers.setdefault):
            trace = AllocationTrace(self.device.type, rounded=self.rounded)
            trace.track(state_tensors(self._model, self._optimizers))
            rest = torch.cuda.memory_allocated(self.device) - self._own_bytes() - trace.live_bytes
            trace.add(rest)  # workspaces, and tensors that the step may use or not
            with trace:
                for _ in range(2):
                    trace.begin_step()
                    self._step()
        return trace.allocations

    def run(self) -> StepRun:
        return StepRun(self.levels(NO_BLOCKS), min(self._timed(NO_BLOCKS).total for _ in range(_TIMED_RUNS)))

    def run_once(self) -> None:
        """Runs the step for other processes, which measure it; the figures of this process are not used."""
        with on_optimizer_step(self._optimizers.setdefault):
            self._run_step()

    def memory(self, static: int, sharers: int = 1) -> DeviceMemory:
        return device_memory(self.device, static, sharers)

    def _own_bytes(self) -> int:
        """Returns the bytes on the device that only planning holds: its copies, and tensors that the step has replaced.

        A step may store its outputs, or an average that it computes anew, in the place of those of the step before,
        which are then freed; while it is planned they are held, to be put back.
        """
        if self._reach is None:
            return self._copy_bytes
        alive = [*self._model_tensors(), *chain.from_iterable(self._reach().tensors.values())]
        places = {storage.data_ptr() for tensor in alive for storage in storages_of(tensor)}
        replaced = {
            storage.data_ptr(): self.rounded(storage.nbytes())
            for tensor in self._first_reached
            for storage in storages_of(tensor)
            if storage.device == self.device
        }
        return self._copy_bytes + sum(num_bytes for place, num_bytes in replaced.items() if place not in places)

    def restoring(self) -> AbstractContextManager[None]:
        reach = partial(reached_by, self._step_fn, self._model, self._restore, self._where)
        reached = reach()
        return self.excluding_own(self._restoring(reached), reached, reach)

    @scope
    def excluding_own(
        self, undo: Undo, restoring: Scope[None], reached: StepReach, reach: Callable[[], StepReach]
    ) -> Iterator[None]:
        """Enters ``restoring``, and excludes what it allocates, and holds alone, from the peaks of steps within.

        ``reach`` finds what the step can change, and has found ``reached``.
        """
        undo.append((setattr, (self, "_copy_bytes", 0)))
        undo += [(setattr, (self, "_reach", None)), (setattr, (self, "_first_reached", []))]
        if self.device.type == "cuda":
            self._reach, self._first_reached = reach, [*chain.from_iterable(reached.tensors.values())]
        with self._copying():
            enter(undo, restoring)
        yield

    @contextmanager
    def _copying(self) -> Iterator[None]:
        allocated = partial(torch.cuda.memory_allocated, self.device) if self.device.type == "cuda" else int
        before = allocated()
        yield
        self._copy_bytes += allocated() - before

    @scope
    def _restoring(self, undo: Undo, reached: StepReach) -> Iterator[None]:
        state = TrainingState(
            self._model_tensors(),
            tree=ModuleTree([model_of(self._model)]),
            reached=reached,
            has_gradients=True,
        )

        def add(optimizer: Optimizer) -> None:
            with self._copying():
                state.add(optimizer)

        undo.append((state.restore, ()))
        enter(undo, on_optimizer_step(add))
        yield

    def new_meter(self) -> LevelMeter:
        return LevelMeter(self.device, level_counter(self.device, state_tensors(self._model, self._optimizers)))

    def _timed(self, blocks: Blocks) -> StepClock:
        self.before_step()
        clock = StepClock(self.device)
        with clock.metering(blocks):
            self._run_step()
        return clock

    def _model_tensors(self) -> list[torch.Tensor]:
        return [*self._model.parameters(), *self._model.buffers()]


def state_tensors(model: nn.Module, optimizers: Iterable[Optimizer]) -> list[torch.Tensor | None]:
    state = chain.from_iterable(map(states_of, optimizers))
    weights = list(model.parameters())
    gradients = (parameter.grad for parameter in weights)
    return [*weights, *model.buffers(), *gradients, *gradient_buckets(weights), *state]


def states_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yields the tensors of an optimizer's state."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _far_blocks(blocks: Blocks, options: Sequence[Option]) -> list[str]:
    return [name for name, option in zip(blocks.names, options, strict=True) if option.is_far]


def _fastest(clocks: Sequence[StepClock]) -> dict[Interval, float]:
    seconds = [clock.seconds for clock in clocks]
    return {interval: min(each.get(interval, 0.0) for each in seconds) for interval in seconds[0]}


MakeModel: TypeAlias = Callable[[], tuple[nn.Module, Callable[[], object]]]
"""Returns a model and a function that runs one training step of it."""


def made_step(
    make: MakeModel, device: FakeDevice | None, where: str, restore: Restore = None
) -> tuple[RealStep | FakeStep, nn.Module]:
    """Returns the step that ``make`` returns, and its model: on the device of the model, or simulated on ``device``.

    ``where`` names the argument ``make``, and ``restore`` is what the step changes beside what is found.
    """
    name = where.partition(".")[0]
    check_restore(restore, name, is_absent=device is not None)
    if device is None:
        model, step_fn = _checked_pair(make(), where)
        return RealStep(model, step_fn, restore, name), model
    optimizers: dict[Optimizer, None] = {}
    with device.building():
        model, step_fn = _checked_pair(make(), where)
    with on_optimizer_step(optimizers.setdefault):
        first = first_step(device, step_fn)  # creates the state of the optimizers
    return FakeStep(device, model, step_fn, list(optimizers), first=first), model


def first_step(device: FakeDevice, step_fn: Callable[[], object]) -> LiveBytes:
    """Runs a step, and returns the counter of the storages that it leaves behind: later ones begin with them."""
    first = LiveBytes(record_timeline=False, counts_fake=True)
    with device, first:
        step_fn()
    gc.collect()  # what is alive from here on is what the step finds each time
    return first


def _checked_pair(pair: Any, where: str) -> tuple[nn.Module, Callable[[], object]]:
    kinds = type(pair).__name__
    if isinstance(pair, tuple) and len(pair) == 2:
        model, step_fn = pair
        if isinstance(model, nn.Module) and callable(step_fn):
            return model, step_fn
        kinds = f"{type(model).__name__} and {type(step_fn).__name__}"
    fix = "end the function in `return model, step_fn`"
    raise ConfigError(f"{where}: expected a model and a step function, got {kinds} · fix: {fix}")


@final
class FakeStep:
    """A training step whose model, optimizer and inputs were created inside of ``device``.

    ``capture_after`` is the number of warm-up steps of a step that is captured; ``None`` for one that runs eagerly.
    ``num_micro_batches``, if it is above ``num_traced``, is that of the step of which ``step_fn`` runs ``num_traced``:
    the others are like one of these, so that they change no peak. Each counts with the mean of the seconds of those
    that run, of which the first has no gradients to add to. ``first`` has counted the storages of a step that has run.
    """

    is_simulated = True

    def __init__(
        self,
        device: FakeDevice,
        model: nn.Module,
        step_fn: Callable[[], object],
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        capture_after: int | None = None,
        num_micro_batches: int = 0,
        num_traced: int = 2,
        first: LiveBytes | None = None,
    ) -> None:
        self._device = device
        self.machine = device.machine
        self.device_name = self.machine.name
        self.rounded = self.machine.rounded
        self.world_size, self.rank = (
            (1, 0) if device.cluster is None else (device.cluster.world_size, device.cluster.rank)
        )
        self.no_copies = f"offload: {self.device_name} has no rates of copies in its profile"
        self._model = model
        self._step_fn = step_fn
        self._optimizers = [] if optimizer is None else [optimizer] if isinstance(optimizer, Optimizer) else optimizer
        self.rules = AllocatorRules.of_environment()
        """Settings of the allocator that is simulated."""
        self._capture_after = capture_after
        self._first = first
        self._num_others = max(0, num_micro_batches - num_traced)
        """The micro-batches that do not run."""
        self._factor = 1 + self._num_others / num_traced
        self._optimizer_seconds = 0.0
        """Those of the first step that was sampled, in which all blocks run."""
        self._comm_bytes = 0
        self.assumptions: tuple[str, ...] = ()
        """The kernels and settings of the first step that was sampled: see :class:`StepObserver`."""
        with device:
            self._workspaces = [torch.empty(self.machine.workspace_bytes, dtype=torch.uint8) for _ in _CUBLAS_HANDLES]
            # The states exist before the first trace, as in all steps of a training but one; `run` begins without them.
            for each in self._optimizers:
                if each.state:
                    continue
                for parameter in (one for group in each.param_groups for one in group["params"]):
                    if parameter.requires_grad:
                        parameter.grad = torch.empty_like(parameter)
                each.step()
                each.zero_grad()

    @property
    def capacity_bytes(self) -> int:
        """The most that the allocator of the device can reserve."""
        return self.machine.memory_bytes - self.bytes_beside_allocator

    @property
    def bytes_beside_allocator(self) -> int:
        """The CUDA context, and the memory of NCCL for the groups whose collectives a step has run."""
        return self.machine.context_bytes + self._comm_bytes

    def limits_reserved(self, budget: Budget) -> bool:
        """Whether a budget is for the bytes that the allocator reserves: with ``"max"`` they have to fit."""
        return budget == "max" and self.machine.kind == "cuda"

    def replay(self, allocations: AllocationLog) -> Replay | None:
        """Replays the first steps in the allocator of the device, with its memory if that is enough.

        Returns ``None`` for a device without a caching allocator.
        """
        return None if self.machine.kind != "cuda" else self._replayed(allocations, self.rules)

    def reserved_if_expandable(self, allocations: AllocationLog) -> int:
        return self._replayed(allocations, replace(self.rules, expandable_segments=True)).reserved_bytes

    def _replayed(self, allocations: AllocationLog, rules: AllocatorRules) -> Replay:
        try:
            return replay(allocations, rules, self.capacity_bytes, capture_after=self._capture_after)
        except CapacityError:
            return replay(allocations, rules, capture_after=self._capture_after)

    def least_capacity(self, allocations: AllocationLog, limit: int = 0) -> int:
        """Returns the least memory with which the allocator releases no segments after the second step.

        It is found to 2 MiB, or to 1 / 2000 of ``limit``, and is at most ``limit`` if that is enough. The search ends
        below :data:`ENOUGH` of ``limit``: what is returned then is enough, and may be more than the least.
        """
        options: dict[str, Any] = {"capture_after": self._capture_after}
        num_bytes = least_capacity(allocations, self.rules, ENOUGH * limit, limit // _LEAST_SHARE, **options)
        is_enough = num_bytes > limit > 0 and fits(allocations, limit, self.rules, **options)
        return limit if is_enough else num_bytes

    def copy_rates(self, target: Offload) -> tuple[float, float] | None:
        rates = target.rates(self.machine)
        return rates if min(rates) > 0 else None

    def sample(self, blocks: Blocks, options: Sequence[Option]) -> StepSample:
        store = SimulatedStore(_far_blocks(blocks, options))
        learns = any(b.is_floating_point() for module in blocks.modules for b in module.buffers())
        with self._device, blocks.under(options, [store] * len(options), learns=learns):
            if learns:  # a first run finds buffers that change, such as the statistics of BatchNorm
                self._step_fn()
            timeline = self._device.new_timeline()
            observer = StepObserver(timeline.op_seconds)
            trace = self._new_trace(timeline.op_seconds if self.assumptions else observer.op_seconds)
            meter = LevelMeter(_HOST, trace)
            trace.track([*self._workspaces, *state_tensors(self._model, self._optimizers)])
            if self._first is not None:  # averages of weights, or a loss that is stored: used late, and alive before
                trace.track_storages_of(self._first)
            with timeline.waits(), metered(blocks, meter, [store]), observer.observing_optimizers():
                self._step_fn()
        levels = meter.result()
        self._comm_bytes = max(self._comm_bytes, timeline.comm_bytes)
        if not self.assumptions:
            self.assumptions = observer.assumptions(self._device.autocast_dtypes)
            self._optimizer_seconds = sum(s for i, s in levels.seconds.items() if i.phase is Phase.OPTIMIZER)
        factor = self._factor * (1 + self._bubble_share)  # other stages recompute as well
        seconds = {i: s if i.phase is Phase.OPTIMIZER else factor * s for i, s in levels.seconds.items()}
        total = self._seconds_of_all(timeline.seconds(), timeline.first).total
        return StepSample(levels, levels.peak_bytes, seconds, total)

    def memory(self, static: int, sharers: int = 1) -> DeviceMemory:
        del static, sharers
        return absent_memory(self.machine.kind, self.machine.memory_bytes, self.bytes_beside_allocator)

    def restoring(self) -> AbstractContextManager[None]:
        return nullcontext()

    def run(self, blocks: Blocks = NO_BLOCKS, costs: list[OpCost] | None = None) -> StepRun:
        """Runs the first two steps of a process; the levels and the seconds are those of the second.

        ``costs`` gets those of all ops of the second, from which the seconds on another device follow.
        """
        with self._device, self._from_start():
            timeline = self._device.new_timeline(costs)
            # From an empty process, as its allocator would see it: the first step puts optimizer states among
            # activations, which leaves gaps that later steps have to live with. The second is the first step in which
            # all of them exist, and all later ones are like it.
            trace = self._new_trace(None)
            weights = [*self._model.parameters(), *self._model.buffers()]
            buckets = gradient_buckets(weights)
            trace.track([*weights, *buckets, *self._workspaces])
            trace.label(weights, "weights")
            trace.label(buckets, "gradients")
            trace.label(self._workspaces, "workspaces")

            def see(optimizer: Optimizer) -> None:
                """Labels what there is: in the first step gradients, in the second one states as well."""
                parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                trace.label((parameter.grad for parameter in parameters), "gradients")
                trace.label(states_of(optimizer), "optimizer states")

            meter = LevelMeter(_HOST, trace)
            with on_optimizer_step(see), timeline.waits():
                with trace:
                    trace.begin_step()
                    self._step_fn()  # creates optimizer states, and finds buffers that change
                    trace.begin_step()
                trace.op_seconds = timeline.op_seconds  # the first step is not like later ones, and has no use for it
                with meter.metering(blocks):
                    self._step_fn()
            trace.label((parameter.grad for parameter in self._model.parameters()), "gradients")
        self._comm_bytes = max(self._comm_bytes, timeline.comm_bytes)
        seconds = self._seconds_of_all(timeline.seconds(), timeline.first)
        return StepRun(meter.levels(), seconds.total, trace.allocations, *seconds[1:])

    def _seconds_of_all(self, seconds: StepSeconds, first: StepSeconds) -> StepSeconds:
        """Returns the seconds of a step with all micro-batches, of which ``first`` are those of the first one.

        The micro-batches that do not run communicate as the first one does: DDP reduces gradients in the last one.
        """
        computing = self._factor * (seconds.total - seconds.exposed - self._optimizer_seconds)
        exposed = seconds.exposed + self._num_others * first.exposed
        communication = seconds.communication + self._num_others * first.communication
        bubble = self._bubble_share * (computing + exposed)
        return StepSeconds(computing + exposed + bubble + self._optimizer_seconds, communication, exposed, bubble)

    @property
    def _bubble_share(self) -> float:
        return 0.0 if self._device.cluster is None else self._device.cluster.bubble_share

    @contextmanager
    def _from_start(self) -> Iterator[None]:
        """Removes gradients and optimizer states within the ``with`` block, as before the first step."""
        with StandIns() as stand_ins:
            for parameter in self._model.parameters():
                stand_ins.swap(parameter, grad=None)
            for optimizer in self._optimizers:
                stand_ins.swap(optimizer, state=defaultdict(dict))
            yield

    def ops(self, blocks: Blocks) -> list[list[OpTimes]]:
        with self._device:
            timeline = self._device.new_timeline()
            return record_ops(blocks, self._step_fn, torch.device("cpu"), timeline.op_seconds)

    @contextmanager
    def restricted_to(self, blocks: Blocks, numbers: Sequence[int]) -> Iterator[bool]:
        """Removes the other blocks from their ``nn.ModuleList``; yields whether it could. The step may fail then."""
        chosen = {id(blocks.modules[number]) for number in numbers}
        others = {id(module) for module in blocks.modules} - chosen
        lists = [m for m in self._model.modules() if others & {id(child) for child in m.children()}]
        if not lists or not all(isinstance(each, nn.ModuleList) for each in lists):
            yield False
            return
        with StandIns() as stand_ins:
            for each in lists:
                # Numbered anew: a list looks its children up by position.
                rest = [module for module in each._modules.values() if id(module) not in others]
                stand_ins.swap(each, _modules={str(number): module for number, module in enumerate(rest)})
            yield True

    def _new_trace(self, op_seconds: OpSeconds | None) -> AllocationTrace:
        rounded, extra_bytes = self.rounded, self.machine.op_extra_bytes
        return AllocationTrace("meta", is_fake=True, rounded=rounded, op_seconds=op_seconds, extra_bytes=extra_bytes)
