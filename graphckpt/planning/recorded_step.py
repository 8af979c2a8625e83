"""A training step that has run once, as a step that the planner can measure: its blocks are called again, one by one.

The training loop runs its step itself, with every block recomputed, which takes little memory. That run shows what
happens outside of the blocks. What a block does under another policy is the same wherever it is called, so each call is
repeated alone, with inputs and gradients of the same shapes. No code of the training loop runs twice.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.optim import Optimizer

from graphckpt._compat import unseen_by_modes
from graphckpt.engine.objects import copy_objects
from graphckpt.errors import PlanError
from graphckpt.planning.candidates import NEAR, OpTimes, Option
from graphckpt.planning.memory_model import StepSample
from graphckpt.planning.options import DeviceMemory
from graphckpt.planning.program import Phase
from graphckpt.planning.steps import RealStep
from graphckpt.planning.trace import Blocks, Trace, TracedStore
from graphckpt.rules.basic import Full
from graphckpt.stores.base import Offload
from graphckpt.thread_state import Ambient, enter_ambient, rng_devices, take_ambient
from graphckpt.training_state import ModuleTree, TrainingState
from graphckpt.tree import ATOMS, build_value, flatten_value, tensors_in

FULL = next(option for option in NEAR if option.rule == Full())


class _Storage(NamedTuple):
    """A storage of an argument: values of floating point do not matter, indices and masks do."""

    num_elements: int
    dtype: torch.dtype
    device: torch.device
    value: torch.Tensor | None

    def tensor(self) -> torch.Tensor:
        if self.value is not None:
            return self.value
        if self.dtype.itemsize == 1:  # float8 has no random numbers
            return torch.zeros(self.num_elements, dtype=self.dtype, device=self.device)
        return torch.randn(self.num_elements, dtype=self.dtype, device=self.device)


@final
@dataclass(frozen=True, eq=False)
class _TensorArgument:
    storage: _Storage
    layout: tuple[tuple[int, ...], tuple[int, ...], int]
    requires_grad: bool

    def tensor(self, storages: dict[int, torch.Tensor], anchor: torch.Tensor) -> torch.Tensor:
        if self.requires_grad:
            result = _Argument.apply(anchor, self, storages)
            assert isinstance(result, torch.Tensor)
            return result
        return self.view(storages)

    def view(self, storages: dict[int, torch.Tensor]) -> torch.Tensor:
        flat = storages.get(id(self.storage))
        if flat is None:
            flat = storages[id(self.storage)] = self.storage.tensor()
        return flat.as_strided(*self.layout)


class _Argument(torch.autograd.Function):
    """Creates an argument that is not a leaf: the graph holds leaves, and would hold its memory."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, argument: _TensorArgument, storages: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        del ctx, anchor
        return argument.view(storages)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        del ctx, gradients
        return None, None, None


class _Gradients(torch.autograd.Function):
    """Stands for all that follows a block: its backward creates the gradients of the outputs."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.likes = [(output.shape, output.dtype, output.device) for output in outputs]
        return outputs[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        del gradients
        return tuple([torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.likes])


@final
@dataclass(frozen=True)
class _RecordedCall:
    block: int
    leaves: Sequence[Any]
    """Of its arguments, with a :class:`_TensorArgument` in place of each tensor."""
    spec: Any
    tensors: Sequence[_TensorArgument]
    ambient: Ambient
    had_gradient: frozenset[int]
    """The ids of the block's parameters that had a gradient when it was called."""

    def arguments(self, anchor: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        storages: dict[int, torch.Tensor] = {}
        tensors: dict[int, torch.Tensor] = {}
        for argument in self.tensors:
            tensors[id(argument)] = argument.tensor(storages, anchor)
        result: tuple[tuple[Any, ...], dict[str, Any]] = build_value(
            self.spec, [_filled_in(leaf, tensors) for leaf in self.leaves]
        )
        return result


def _filled_in(leaf: Any, tensors: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(leaf, _Blueprint):
        return copy.deepcopy(leaf.value, dict(tensors))
    return tensors[id(leaf)] if isinstance(leaf, _TensorArgument) else leaf


class _Blueprint(NamedTuple):
    """An object among the arguments, such as a cache, as it was before the call."""

    value: Any


@final
class _CallRecorder:
    """Records with what the blocks are called, without holding the tensors."""

    def __init__(self, devices: tuple[torch.device, ...]) -> None:
        self.calls: list[_RecordedCall] = []
        self._devices = devices
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, _Storage]] = {}

    def add(self, block: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, spec = flatten_value((args, kwargs))
        tensors: dict[int, _TensorArgument] = {}
        with unseen_by_modes(), torch.no_grad():
            entries = [self._entry(leaf, tensors) for leaf in leaves]
        ambient = take_ambient(self._devices)
        had_gradient = frozenset(id(p) for p in module.parameters() if p.grad is not None)
        self.calls.append(_RecordedCall(block, entries, spec, list(tensors.values()), ambient, had_gradient))

    def _entry(self, leaf: Any, tensors: dict[int, _TensorArgument]) -> Any:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in tensors:
                tensors[id(leaf)] = self._tensor(leaf)
            return tensors[id(leaf)]
        if type(leaf) in ATOMS or isinstance(leaf, (nn.Module, type)) or callable(leaf):
            return leaf
        reached = [
            item
            for _, content in copy_objects([leaf])
            if not isinstance(content, torch.Tensor)
            for item in (content.values() if isinstance(content, dict) else content)
        ]
        memo: dict[int, Any] = {id(item): item for item in reached if isinstance(item, (nn.Module, type))}
        memo |= {id(item): self._entry(item, tensors) for item in reached if isinstance(item, torch.Tensor)}
        try:
            return _Blueprint(copy.deepcopy(leaf, memo))
        except Exception:  # an object that cannot be copied is passed by reference
            return leaf

    def _tensor(self, tensor: torch.Tensor) -> _TensorArgument:
        if tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__"):
            what = f"expected blocks that are called with plain tensors, got {type(tensor).__name__}"
            raise PlanError(f"memory_budget: {what} · fix: graphckpt.plan with a step of your own")
        storage = tensor.untyped_storage()
        former, version, entry = self._storages.get(id(storage), (None, -1, None))
        if entry is None or former is None or former() is not storage or version != tensor._version:
            num_elements = storage.nbytes() // tensor.element_size()
            is_needed = not (tensor.is_floating_point() or tensor.is_complex())
            value = tensor.detach().as_strided((num_elements,), (1,), 0).clone() if is_needed else None
            entry = _Storage(num_elements, tensor.dtype, tensor.device, value)
            self._storages[id(storage)] = weakref.ref(storage), tensor._version, entry
        layout = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        return _TensorArgument(entry, layout, tensor.requires_grad)


@final
class RecordedStep:
    """One step of a training loop, which the loop itself has run.

    Args:
        model: The model.
        blocks: Its blocks that are planned.
        optimizers: Those of the loop, by id, as far as they are known.
    """

    no_copies = RealStep.no_copies
    is_simulated = False

    def __init__(self, model: nn.Module, blocks: Blocks, optimizers: Iterable[Optimizer]) -> None:
        self._model = model
        self._blocks = blocks
        self._number_of = {id(module): number for number, module in enumerate(blocks.modules)}
        self._real = RealStep(model, self._replay)
        self._optimizers = list(optimizers)
        for optimizer in self._optimizers:
            self._real.remember(optimizer)
        self.device = self._real.device
        self.seconds = 0.0
        """Seconds of the step without recording."""
        self._devices = rng_devices([*model.parameters()][:1])
        self._calls: Sequence[_RecordedCall] = ()
        self._trace: Trace | None = None
        self._numbers: frozenset[int] = frozenset()
        self._later: frozenset[int] = frozenset()
        self._originals: Mapping[int, int] = {}
        """The ids of the model's parameters, by those of the parameters that replace them."""
        self._num_states = -1

    @contextmanager
    def recording(self, store: TracedStore) -> Iterator[None]:
        """Records the step that runs within the ``with`` block; each planned block is recomputed, with this store."""
        self._trace = self._real.new_trace()
        self._num_states = self._state_tensors()
        recorder = _CallRecorder(self._devices)
        trace = self._trace

        def see(number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.is_grad_enabled() and not trace.is_in_block:
                recorder.add(number, module, args, kwargs)

        with ExitStack() as stack:
            for number, module in enumerate(self._blocks.modules):
                hook = _numbered(see, number)
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            stack.enter_context(self._blocks.traced(trace, [store]))
            yield
        self._calls = recorder.calls
        self._later = frozenset(self._calls_after_others())

    def _state_tensors(self) -> int:
        return sum(len(state) for optimizer in self._optimizers for state in optimizer.state.values())

    @property
    def has_new_states(self) -> bool:
        """Whether the step has created states of optimizers, so that a later step takes more memory."""
        return self._state_tensors() != self._num_states

    @property
    def num_blocks(self) -> int:
        """The number of blocks that the step has called."""
        return len({call.block for call in self._calls})

    @property
    def peak_bytes(self) -> int:
        """The peak of live bytes of the step as it ran, with every block recomputed."""
        assert self._trace is not None
        return self._trace.peak_bytes

    @property
    def device_name(self) -> str:
        return self._real.device_name

    def memory(self, static: int, sharers: int = 1) -> DeviceMemory:
        return self._real.memory(static, sharers)

    def copy_rates(self, target: Offload) -> tuple[float, float] | None:
        return self._real.copy_rates(target)

    def base(self, options: Sequence[Option]) -> tuple[StepSample, int]:
        """Returns the step as it ran, and the number of the option that its blocks had; -1 if it is not among them."""
        assert self._trace is not None
        return StepSample(self._trace.log, self._trace.peak_bytes, {}, self.seconds), self.option_of(options)

    @staticmethod
    def option_of(options: Sequence[Option]) -> int:
        fitting = [n for n, o in enumerate(options) if o.rule == Full() and not (o.is_far or o.is_part)]
        return fitting[0] if fitting else -1

    def sample(self, blocks: Blocks, options: Sequence[Option]) -> StepSample:
        with self._restricted(blocks):
            return self._real.sample(blocks, options)

    def ops(self, blocks: Blocks) -> list[list[OpTimes]]:
        with self._restricted(blocks):
            return self._real.ops(blocks)

    def restricted_to(self, blocks: Blocks, numbers: Sequence[int]) -> AbstractContextManager[bool]:
        """Yields True: blocks are called one by one, so some of each kind suffice."""
        del blocks, numbers
        return nullcontext(True)

    def repeat_longest(self, blocks: Blocks, orders: Sequence[Sequence[int]]) -> bool:
        """Returns False: the calls are recorded, so their order does not change."""
        del blocks, orders
        return False

    @contextmanager
    def _restricted(self, blocks: Blocks) -> Iterator[None]:
        self._numbers = frozenset(self._number_of[id(module)] for module in blocks.modules)
        yield

    @contextmanager
    def standing_alone(self) -> Iterator[None]:
        """Lets the blocks be called within the ``with`` block without effects on the model.

        Their parameters share memory with the model's, but have gradients of their own, and none of the hooks by which
        processes average gradients or optimizers step in backward.
        """
        tree = ModuleTree(self._blocks.modules)
        state = TrainingState(tree.buffers(), tree=tree)
        twins: dict[int, nn.Parameter] = {}
        try:
            for module in tree.modules:
                for name, parameter in module._parameters.items():
                    if parameter is None or not parameter.requires_grad:
                        continue
                    if type(parameter) is not nn.Parameter or hasattr(parameter.data, "__tensor_flatten__"):
                        what = f"expected whole parameters in planned blocks, got {type(parameter.data).__name__}"
                        fix = "graphckpt.plan before the model is sharded, or rule='full'"
                        raise PlanError(f"memory_budget: {what} in {type(module).__name__} · fix: {fix}")
                    module._parameters[name] = twins.setdefault(id(parameter), nn.Parameter(parameter.detach()))
            self._originals = {id(twin): number for number, twin in twins.items()}
            yield
        finally:
            self._originals = {}
            state.restore()

    def _replay(self) -> None:
        assert self._trace is not None
        for number, (recorded, border) in enumerate(zip(self._calls, self._trace.log.calls, strict=True)):
            if recorded.block in self._numbers:
                for twin in self._blocks.modules[recorded.block].parameters():
                    if (own := self._originals.get(id(twin))) is not None:
                        is_added_to = number in self._later or own in recorded.had_gradient
                        twin.grad = torch.zeros_like(twin) if is_added_to else None
                self._repeat(recorded, sorted(border.gradients))

    def _calls_after_others(self) -> Iterator[int]:
        """Yields the calls between whose forward and backward another call of their block has its backward."""
        assert self._trace is not None
        pending: dict[int, set[int]] = {}
        for interval in (span.interval for span in self._trace.log.stretches):
            if not interval.is_of_block:
                continue
            own = pending.setdefault(self._calls[interval.call].block, set())
            if interval.phase is Phase.FORWARD:
                own.add(interval.call)
            elif interval.call in own:
                own.remove(interval.call)
                yield from own

    def _repeat(self, recorded: _RecordedCall, wanted: Sequence[int]) -> None:
        """Calls a block as it was called, and runs its backward from gradients of the outputs ``wanted``."""
        module = self._blocks.modules[recorded.block]
        anchor = torch.zeros((), device=self.device, requires_grad=True)
        with ExitStack() as stack, torch.enable_grad():
            enter_ambient(stack, recorded.ambient, take_ambient(self._devices))
            end = _called(module, recorded, anchor, wanted)
        if end is not None:
            end.backward()


def _called(
    module: nn.Module, recorded: _RecordedCall, anchor: torch.Tensor, wanted: Sequence[int]
) -> torch.Tensor | None:
    """Returns a loss of the outputs ``wanted``; nothing else refers to them or to the arguments any more."""
    args, kwargs = recorded.arguments(anchor)
    outputs = tensors_in(module(*args, **kwargs))
    ends = [outputs[number] for number in wanted if number < len(outputs) and outputs[number].requires_grad]
    return _Gradients.apply(*ends) if ends else None


def _numbered(see: Callable[..., None], number: int) -> Callable[..., None]:
    return lambda module, args, kwargs: see(number, module, args, kwargs)
