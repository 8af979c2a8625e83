"""A step that a training loop has run once, as a step that the planner can measure.

The loop runs its step itself, with every block recomputed, which takes little memory::

    recorded   forward of a, forward of b, loss, backward, optimizer     once, by the loop
    repeated   forward and backward of a; forward and backward of b      under each option, by the planner

The trace of the recorded step shows what happens outside of the blocks. What a block does is the same wherever it is
called, so each call is repeated alone: with arguments of the same shapes and storages, with gradients of the same
shapes for its outputs, and with parameters of its own that share the memory of the model's. No code of the loop runs
twice, and no hook of the model sees a gradient.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.optim import Optimizer

from graphckpt._compat import unseen_by_modes
from graphckpt.blocks.hooks import ModuleHook
from graphckpt.engine.sampling import without_value_checks
from graphckpt.errors import ConfigError, PlanError
from graphckpt.planning.candidates import NEAR, Option
from graphckpt.planning.memory_model import StepSample
from graphckpt.planning.program import Phase, StepLog
from graphckpt.planning.steps import RealStep
from graphckpt.planning.trace import Blocks, items_in
from graphckpt.planning.traced_stores import TracedStore, traced
from graphckpt.rules.basic import Full
from graphckpt.thread_state import Ambient, enter_ambient, rng_devices, take_ambient
from graphckpt.training_state import ModuleTree, TrainingState
from graphckpt.tree import ATOMS, build_value, flatten_value, tensors_in

FULL = next(option for option in NEAR if option.rule == Full())


def refuse_sharded(blocks: Iterable[tuple[str, nn.Module]]) -> None:
    for name, module in blocks:
        for parameter in module.parameters():
            is_plain = type(parameter) is nn.Parameter or not parameter.requires_grad
            if hasattr(parameter.data, "__tensor_flatten__") or not is_plain:
                what = f"expected full parameters, got {type(parameter.data).__name__} in {name}"
                raise ConfigError(f"memory_budget: {what} · fix: rule='full', or plan before the model is sharded")


class _StorageShape(NamedTuple):
    """The size of a storage of an argument. Of integers, such as indices and masks, the values matter too."""

    num_elements: int
    dtype: torch.dtype
    device: torch.device
    value: torch.Tensor | None

    def allocate(self) -> torch.Tensor:
        if self.value is not None:
            return self.value
        if self.dtype.itemsize == 1:  # float8 has no random numbers
            return torch.zeros(self.num_elements, dtype=self.dtype, device=self.device)
        return torch.randn(self.num_elements, dtype=self.dtype, device=self.device)


@final
@dataclass(frozen=True, eq=False)
class _TensorArgument:
    storage: _StorageShape
    layout: tuple[tuple[int, ...], tuple[int, ...], int]
    requires_grad: bool

    def allocate(self, storages: dict[int, torch.Tensor], anchor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor; those of one storage share one of ``storages``."""
        if not self.requires_grad:
            return self._view(storages)
        tensor: torch.Tensor = _NonLeaf.apply(anchor, partial(self._view, storages))
        return tensor

    def _view(self, storages: dict[int, torch.Tensor]) -> torch.Tensor:
        flat = storages.get(id(self.storage))
        if flat is None:
            flat = storages[id(self.storage)] = self.storage.allocate()
        return flat.as_strided(*self.layout)


class _NonLeaf(torch.autograd.Function):
    """Creates an argument that is not a leaf: the graph would hold a leaf, and with it the memory."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, view: partial[torch.Tensor]) -> torch.Tensor:
        del ctx, anchor
        return view()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        del ctx, gradients
        return None, None


class _Loss(torch.autograd.Function):
    """Replaces all that follows a block: its backward creates the gradients of the outputs."""

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
    """One call of a block: what :meth:`run` needs to repeat it, without the memory of its arguments."""

    block: int
    leaves: Sequence[Any]
    """Of its arguments, with a :class:`_TensorArgument` in place of each tensor."""
    spec: Any
    tensors: Sequence[_TensorArgument]
    ambient: Ambient
    had_gradient: frozenset[str]
    """The parameters of the block that had a gradient, to which backward added."""

    def run(self, module: nn.Module, anchor: torch.Tensor, wanted: Sequence[int]) -> torch.Tensor | None:
        """Returns a loss of the outputs ``wanted``; nothing else refers to them or to the arguments any more."""
        storages: dict[int, torch.Tensor] = {}
        tensors = {id(argument): argument.allocate(storages, anchor) for argument in self.tensors}
        args, kwargs = build_value(self.spec, [_with_tensors(leaf, tensors) for leaf in self.leaves])
        del storages, tensors
        outputs = tensors_in(module(*args, **kwargs))
        ends = [outputs[number] for number in wanted if number < len(outputs) and outputs[number].requires_grad]
        loss: torch.Tensor | None = _Loss.apply(*ends) if ends else None
        return loss


def _with_tensors(leaf: Any, tensors: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(leaf, _ObjectCopy):
        return copy.deepcopy(leaf.value, dict(tensors))
    return tensors[id(leaf)] if isinstance(leaf, _TensorArgument) else leaf


class _ObjectCopy(NamedTuple):
    """An object among the arguments, such as a cache, as it was before the call."""

    value: Any


@final
class _CallRecorder:
    """Records the arguments of blocks, without holding the tensors."""

    def __init__(self, devices: tuple[torch.device, ...]) -> None:
        self.calls: list[_RecordedCall] = []
        self._devices = devices
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, _StorageShape]] = {}

    def add(self, block: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, spec = flatten_value((args, kwargs))
        tensors: dict[int, _TensorArgument] = {}
        with unseen_by_modes(), torch.no_grad():
            entries = [self._entry(leaf, tensors) for leaf in leaves]
        ambient = take_ambient(self._devices)
        had_gradient = frozenset(name for name, p in module.named_parameters() if p.grad is not None)
        self.calls.append(_RecordedCall(block, entries, spec, list(tensors.values()), ambient, had_gradient))

    def _entry(self, leaf: Any, tensors: dict[int, _TensorArgument]) -> Any:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in tensors:
                tensors[id(leaf)] = self._tensor(leaf)
            return tensors[id(leaf)]
        if type(leaf) in ATOMS or isinstance(leaf, (nn.Module, type)) or callable(leaf):
            return leaf
        reached = list(items_in(leaf))
        memo: dict[int, Any] = {id(item): item for item in reached if isinstance(item, (nn.Module, type))}
        memo |= {id(item): self._entry(item, tensors) for item in reached if isinstance(item, torch.Tensor)}
        try:
            return _ObjectCopy(copy.deepcopy(leaf, memo))
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
            entry = _StorageShape(num_elements, tensor.dtype, tensor.device, value)
            self._storages[id(storage)] = weakref.ref(storage), tensor._version, entry
        layout = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        return _TensorArgument(entry, layout, tensor.requires_grad)


@final
class RecordedStep(RealStep):
    """One step of a training loop, which the loop itself has run within :meth:`recording`. Its calls are repeated.

    Args:
        model: The model.
        blocks: Its blocks that are planned.
        optimizers: Those of the loop, as far as they are known.
        seconds: Seconds of a step that was not recorded.
    """

    def __init__(self, model: nn.Module, blocks: Blocks, optimizers: Iterable[Optimizer], seconds: float) -> None:
        super().__init__(model, self._repeat_calls)
        self._blocks = blocks
        self._step_seconds = seconds
        self._devices = rng_devices([*model.parameters()][:1])
        for optimizer in optimizers:
            self.remember(optimizer)
        self._trace = self.new_trace()
        self._calls: Sequence[_RecordedCall] = ()
        self._numbers: Sequence[int] = range(len(blocks.modules))
        """The blocks that are repeated."""
        self.has_new_states = False
        """Whether the step has created states of optimizers, so that a later step takes more memory."""
        self.input_sizes: dict[str, int] = {}
        """The largest input of the modules around the blocks, by name, in elements; the training loop's to fill."""

    @contextmanager
    def recording(self, store: TracedStore) -> Iterator[None]:
        """Records the step that runs within the ``with`` block; each planned block is recomputed, with this store."""
        recorder, num_states = _CallRecorder(self._devices), self._num_states()

        def record(number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.is_grad_enabled() and not self._trace.is_in_block:
                recorder.add(number, module, args, kwargs)

        with ExitStack() as stack:
            stack.enter_context(without_value_checks())
            for number, module in enumerate(self._blocks.modules):
                hook = ModuleHook(partial(record, number))
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            stack.enter_context(traced(self._blocks, self._trace, [store]))
            yield
        self._calls = recorder.calls
        self.has_new_states = self._num_states() != num_states

    def _num_states(self) -> int:
        return sum(len(state) for optimizer in self._optimizers.values() for state in optimizer.state.values())

    @property
    def named_blocks(self) -> list[tuple[str, nn.Module]]:
        """The blocks that it was recorded with, of which the training loop may have replaced some since."""
        return list(zip(self._blocks.names, self._blocks.modules, strict=True))

    @property
    def num_blocks(self) -> int:
        """The number of blocks that the step has called."""
        return len({call.block for call in self._calls})

    @property
    def has_backward(self) -> bool:
        """Whether a backward went through a block; the step cannot be planned otherwise."""
        return StepLog(self._trace.log).has_backward

    @property
    def peak_bytes(self) -> int:
        """The peak of live bytes of the step as it ran, with every block recomputed."""
        return self._trace.peak_bytes

    def base(self, blocks: Blocks, options: Sequence[Option]) -> tuple[StepSample, int]:
        """Returns the step as it ran, and the number of the option that its blocks had; -1 if it is not among them."""
        del blocks
        return StepSample(self._trace.log, self._trace.peak_bytes, {}, self._step_seconds), self.option_of(options)

    @staticmethod
    def option_of(options: Sequence[Option]) -> int:
        return next((n for n, o in enumerate(options) if o.rule == Full() and not (o.is_far or o.is_part)), -1)

    @contextmanager
    def restricted_to(self, blocks: Blocks, numbers: Sequence[int]) -> Iterator[bool]:
        """Repeats the calls of these blocks alone, and yields True: some of each kind suffice."""
        del blocks
        self._numbers = numbers
        yield True

    @contextmanager
    def standing_alone(self) -> Iterator[None]:
        """Gives the blocks parameters of their own within the ``with`` block, so that their calls change nothing else.

        They share memory with the model's, but have gradients of their own, and none of the hooks by which processes
        average gradients or optimizers step in backward.
        """
        refuse_sharded(zip(self._blocks.names, self._blocks.modules, strict=True))
        tree = ModuleTree(self._blocks.modules)
        state = TrainingState(tree.buffers(), tree=tree)
        twins: dict[int, nn.Parameter] = {}
        try:
            for module in tree.modules:
                for name, parameter in module._parameters.items():
                    if parameter is not None and parameter.requires_grad:
                        module._parameters[name] = twins.setdefault(id(parameter), nn.Parameter(parameter.detach()))
            yield
        finally:
            state.restore()

    def _repeat_calls(self) -> None:
        """Calls the blocks as they were called, each time followed by its backward."""
        after_others = frozenset(self._calls_after_others())
        for number, (call, border) in enumerate(zip(self._calls, self._trace.log.calls, strict=True)):
            if call.block not in self._numbers:
                continue
            module = self._blocks.modules[call.block]
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    is_added_to = number in after_others or name in call.had_gradient
                    parameter.grad = torch.zeros_like(parameter) if is_added_to else None
            anchor = torch.zeros((), device=self.device, requires_grad=True)
            with ExitStack() as stack, torch.enable_grad():
                enter_ambient(stack, call.ambient, take_ambient(self._devices))
                loss = call.run(module, anchor, sorted(border.gradients))
            if loss is not None:
                loss.backward()

    def _calls_after_others(self) -> Iterator[int]:
        """Yields the calls between whose forward and backward another call of their block has its backward.

        Their gradients of parameters are added to those of the other call.
        """
        pending: dict[int, set[int]] = {}
        for interval in (span.interval for span in self._trace.log.spans):
            if not interval.is_of_block:
                continue
            own = pending.setdefault(self._calls[interval.call].block, set())
            if interval.phase is Phase.FORWARD:
                own.add(interval.call)
            elif interval.call in own:
                own.remove(interval.call)
                yield from own
