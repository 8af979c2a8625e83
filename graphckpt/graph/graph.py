"""Graph: the user names modules and optimizers in `__init__` and the step in `build`; a call is one training step."""

from __future__ import annotations

import logging
from collections import OrderedDict
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from graphckpt.blocks.explain import Watcher
from graphckpt.blocks.policy import make_plan
from graphckpt.blocks.proxy import BlockTree, unwrap
from graphckpt.errors import GraphError
from graphckpt.graph.batches import fresh_outputs, micro_batches, pack_outputs
from graphckpt.graph.config import GraphConfig
from graphckpt.graph.inputs import InputCheck
from graphckpt.graph.text import DebugLog, graph_text
from graphckpt.graph.update import ScaledBackward, Update, parameters_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from graphckpt.blocks.forward import BlockForward
    from graphckpt.ledger.record import Explanation

_log = logging.getLogger("graphckpt")
_WATCHED_OPS, _WATCHED_TIMES = (
    2,
    3,
)  # calls 1 and 2 are watched op by op (2 is the first like all others), 3 for time


class Graph:
    """One training step over modules, as OneFlow's ``nn.Graph``, with a policy on each block.

    Subclass it; in ``__init__`` call ``super().__init__()`` first, then assign modules (they become blocks), set policies
    and add optimizers; define ``build``, with ``loss.backward()`` inside. Without an optimizer it is an evaluation graph.

    >>> class Step(Graph):
    ...     def __init__(self, model, optimizer):
    ...         super().__init__()
    ...         self.model = model
    ...         self.model[0].config.activation_checkpointing = True
    ...         self.add_optimizer(optimizer)
    ...     def build(self, x):
    ...         loss = self.model(x).sum()
    ...         loss.backward()
    ...         return loss
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    >>> step = Step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> step(torch.ones(1, 2)).shape
    torch.Size([])
    """

    _numbers: ClassVar[dict[type, Iterator[int]]] = {}

    def __init__(
        self,
        *,
        debug_v_level: int = -1,
        debug_ranks: int | list[int] | None = None,
        debug_max_py_stack_depth: int = 2,
        debug_only_user_py_stack: bool = True,
        debug_op_repr_with_py_stack: bool = False,
    ) -> None:
        number = next(Graph._numbers.setdefault(type(self), count()))
        fields = self.__dict__
        fields["_name"] = f"{type(self).__name__}_{number}"
        fields["_roots"] = {}
        fields["_tree"] = BlockTree(self._mark_stale)
        fields["_update"] = Update(self._name)
        fields["_wrappers"] = []
        fields["_idle"] = {}
        fields["_bystanders"] = []
        fields["_watcher"] = None
        fields["_inputs"] = None
        fields["_num_calls"] = 0
        fields["_is_stale"] = True
        fields["_is_settled"] = False
        fields["_trains"] = False
        fields["_is_plain"] = False
        fields["_is_building"] = False
        fields["_debug"] = DebugLog()
        fields["config"] = GraphConfig(self._mark_stale)
        self.debug(
            debug_v_level,
            ranks=debug_ranks,
            max_py_stack_depth=debug_max_py_stack_depth,
            only_user_py_stack=debug_only_user_py_stack,
            op_repr_with_py_stack=debug_op_repr_with_py_stack,
        )

    # What a subclass defines ------------------------------------------------------------------------------------------

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Defines the step. Inside, the attributes are the real modules."""
        raise NotImplementedError(
            f"{type(self).__name__}.build() is missing · fix: define build(self, ...) with the forward and loss.backward()"
        )

    # What its __init__ calls ------------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        if "_roots" not in self.__dict__:
            raise AttributeError(
                f"{type(self).__name__} is not initialised, so {name!r} cannot be set · "
                "fix: call super().__init__() first in __init__"
            )
        value = unwrap(value)
        where = f"{type(self).__name__}.{name}"
        if isinstance(value, torch.optim.Optimizer):
            raise AttributeError(f"{where}: an Optimizer is no attribute of a Graph · fix: use add_optimizer(...)")
        if isinstance(value, torch.Tensor):
            raise AttributeError(
                f"{where}: a Tensor is no attribute of a Graph · fix: hold it in an nn.Module and assign that"
            )
        if not isinstance(value, nn.Module):
            self._roots.pop(name, None)
            self.__dict__[name] = value
            return
        if self._is_building:
            raise AttributeError(f"{where}: build() cannot add modules · fix: assign it in __init__")
        if not name or "." in name:
            raise KeyError(f"a module's name can be neither empty nor hold a dot, got {name!r}")
        if name in self.__dict__ or hasattr(type(self), name):
            raise KeyError(f"{where}: there is an attribute of this name already · fix: choose another")
        self._roots[name] = value
        self._mark_stale()

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__
        if "_roots" not in fields:
            raise AttributeError(f"{type(self).__name__} is not initialised · fix: call super().__init__() first")
        if name in fields["_roots"]:
            return fields["_tree"].block(fields["_roots"][name], "", name)
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def __delattr__(self, name: str) -> None:
        if self._roots.pop(name, None) is None:
            super().__delattr__(name)
        self._mark_stale()

    def add_optimizer(self, optim: torch.optim.Optimizer, *, lr_sch: Any = None, is_sparse: bool = False) -> None:
        """Makes this a training graph: after ``build`` it clips, steps, zeroes the gradients and steps ``lr_sch``, once.

        A param group with ``clip_grad_max_norm`` (and ``clip_grad_norm_type``, 2.0 by default) is clipped by its own norm.

        Args:
            optim: Any optimizer; several can be added.
            lr_sch: Its scheduler, if any. Neither may be stepped by hand as well.
            is_sparse: Without meaning here.

        Raises:
            GraphError: It is no optimizer, the scheduler is not its own, or it shares a parameter with another.
        """
        del is_sparse
        self._update.add(optim, lr_sch)
        self.config.training = True
        self._mark_stale()

    def set_grad_scaler(self, grad_scaler: torch.amp.GradScaler | None = None) -> None:
        """Scales the losses whose ``backward()`` is called in ``build``; an overflow skips the step and the schedule.

        Raises:
            GraphError: It is no ``torch.amp.GradScaler``.
        """
        if grad_scaler is not None and not isinstance(grad_scaler, torch.amp.GradScaler):
            raise GraphError(
                f"{self._name}.set_grad_scaler: {type(grad_scaler).__name__} is no GradScaler · "
                "fix: pass a torch.amp.GradScaler"
            )
        self._update.scaler = grad_scaler
        self.config.has_scaler = grad_scaler is not None

    def debug(
        self,
        v_level: int = -1,
        *,
        ranks: int | list[int] | None = None,
        max_py_stack_depth: int = 2,
        only_user_py_stack: bool = True,
        op_repr_with_py_stack: bool = False,
    ) -> None:
        """Prints what the next calls do: 0 stages, 1 each block's inputs and outputs, 2 each op, 3 with its line; -1 none."""
        self._debug.configure(v_level, ranks, max_py_stack_depth, only_user_py_stack, op_repr_with_py_stack)
        self.__dict__["_is_settled"] = False

    # What users call --------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one step and returns what ``build`` returned, cut off from the graph."""
        if self._is_settled and not self._is_building:
            return self._step(args, kwargs)
        return self._unsettled_call(args, kwargs)

    @property
    def name(self) -> str:
        """The class name and a number, counted per class."""
        return self._name  # type: ignore[no-any-return]

    @property
    def training(self) -> bool:
        """Whether an optimizer was added."""
        return self.config.training  # type: ignore[no-any-return]

    @property
    def is_compiled(self) -> bool:
        """Whether the graph has been called."""
        return self._num_calls > 0  # type: ignore[no-any-return]

    def explain(self, plot: str | None = None, *, show: bool = True) -> Explanation:
        """Prints what each block keeps, where, and what it costs, as seen in the first calls; returns the rows.

        Args:
            plot: File for a picture of the live bytes over the step, ``.png`` or ``.svg``.
            show: ``False`` returns the rows and prints nothing.

        Raises:
            GraphError: The graph has no optimizer, was never called, or ``config.measure`` is off.
        """
        if not self.training:
            raise GraphError(
                f"{self._name}.explain: an evaluation graph keeps nothing · fix: explain the training graph"
            )
        if self._watcher is None:
            raise GraphError(
                f"{self._name}.explain: no step was watched · fix: call the graph, with config.measure = True"
            )
        return self._watcher.explain(plot, show=show)  # type: ignore[no-any-return]

    def measure(self) -> None:
        """Has the next three calls watched again for :meth:`explain`, as the first three were."""
        self.__dict__["_num_calls"] = 0
        self._mark_stale()

    def state_dict(self, destination: Any = None) -> OrderedDict[str, Any]:
        """Returns each module's state under its attribute name, and that of optimizers, schedulers and scaler."""
        state: OrderedDict[str, Any] = OrderedDict() if destination is None else destination
        for name, module in self._roots.items():
            state[name] = module.state_dict()
        if self.training:
            state.update(self._update.state_dict())
        return state

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Loads what :meth:`state_dict` returned, before the first call or after any.

        Raises:
            GraphError: ``strict``, and a key is missing or unknown. Nothing has been loaded then.
        """
        known = set(self.state_dict())
        missing, unknown = sorted(known - set(state_dict)), sorted(set(state_dict) - known)
        if strict and (missing or unknown):
            raise GraphError(
                f"{self._name}.load_state_dict: missing {missing}, unknown {unknown} · fix: load a state of this graph"
            )
        for name, module in self._roots.items():
            if name in state_dict:
                module.load_state_dict(state_dict[name], strict=strict)
        if self.training and not missing:
            self._update.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return graph_text(type(self).__name__, self._name, self.config, self._roots, self._tree, self._inputs)

    @staticmethod
    def trace(func: Callable[..., Any]) -> Graph:
        """Makes an evaluation graph of a plain function; used as a decorator."""
        if not callable(func) or isinstance(func, type):
            raise GraphError(f"Graph.trace: {func!r} is no function · fix: decorate a function")
        kind = type(func.__name__, (Graph,), {"build": lambda self, *args, **kwargs: func(*args, **kwargs)})
        return kind()  # type: ignore[no-any-return]

    @staticmethod
    def with_dynamic_input_shape(*, size: int = 10, enable_shared: bool = True) -> Callable[..., Any]:
        """Accepts OneFlow's decorator of ``__init__``: inputs of changing shapes are always allowed here."""
        del size, enable_shared
        return lambda init: init

    # How a call runs --------------------------------------------------------------------------------------------------

    def _mark_stale(self) -> None:
        self.__dict__["_is_stale"] = True
        self.__dict__["_is_settled"] = False

    def _unsettled_call(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """A call with something to do beside the step; later ones pass it by, unless they are watched too."""
        fields, config = self.__dict__, self.config
        if self._is_building:
            raise GraphError(
                f"{self._name} is called inside of a build() · fix: a Graph cannot be nested; call the module"
            )
        if self._is_stale:
            self._prepare()
        if self._inputs is None:
            fields["_inputs"] = InputCheck(self.build, args, kwargs)
        elif config.strict_static and (difference := self._inputs.difference(args, kwargs)):
            raise GraphError(
                f"{self._name}: {difference} · fix: keep inputs as they are, or config.strict_static = False"
            )
        is_watched = self._num_calls < _WATCHED_TIMES and config.training and config.measure
        with ExitStack() as stack:
            if self._debug.level >= 0:
                stack.enter_context(self._debug.around(self._name, self._roots))
            if is_watched:
                stack.enter_context(self._watch(args, kwargs))
            output = self._step(args, kwargs)
        fields["_num_calls"] += 1
        fields["_is_settled"] = not (is_watched or config.strict_static or self._debug.level >= 0 or self._is_stale)
        return output

    def _prepare(self) -> None:
        """Makes the wrappers of the blocks anew, after a module, a flag or an optimizer was set."""
        plan = make_plan(self._roots.items(), self._tree.configs)
        self._update.prepare()
        own = {id(p) for optimizer in self._update.optimizers for p in parameters_of(optimizer)}
        held = [p for module in self._roots.values() for p in module.parameters()]
        fields = self.__dict__
        changed = [(w.module, w.rule) for w in plan.wrappers] != [(w.module, w.rule) for w in self._wrappers]
        if changed:  # what the old wrappers have learnt is still true otherwise
            fields["_wrappers"] = plan.wrappers
            fields["_num_calls"] = 0
        fields["_idle"] = plan.idle
        fields["_bystanders"] = [p for p in held if p.requires_grad and id(p) not in own]
        fields["_trains"] = bool(own)
        fields["_is_plain"] = self.config.is_plain and not fields["_bystanders"]
        if changed:
            fields["_watcher"] = None
        fields["_is_stale"] = False

    def _watch(self, args: Any, kwargs: dict[str, Any]) -> AbstractContextManager[Any]:
        if self._watcher is None:
            self.__dict__["_watcher"] = Watcher(self._name, list(self._roots.items()), self._wrappers, self._idle)
        if self._num_calls >= _WATCHED_OPS:
            return self._watcher.time()  # type: ignore[no-any-return]
        inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        return self._watcher.measure(inputs)  # type: ignore[no-any-return]

    def _step(self, args: Any, kwargs: dict[str, Any]) -> Any:
        fields = self.__dict__
        wrappers: list[BlockForward] = fields["_wrappers"]
        roots = fields["_roots"]
        for wrapper in wrappers:
            wrapper.put_on()
        fields.update(roots)
        fields["_is_building"] = True
        try:
            output = self._train(args, kwargs) if fields["_trains"] else self.build(*args, **kwargs)
        finally:
            fields["_is_building"] = False
            for name in roots:
                del fields[name]
            for wrapper in wrappers:
                wrapper.take_off()
        if isinstance(output, torch.Tensor) and output.grad_fn is not None:
            return output.detach()
        return fresh_outputs(output, lambda: self._addresses(args, kwargs))

    def _train(self, args: Any, kwargs: dict[str, Any]) -> Any:
        update = self._update
        update.begin()
        try:
            if self._is_settled and self._is_plain:
                output = self.build(*args, **kwargs)
                update.apply()
                return output
            config = self.config
            if config.num_micro_batches == 1:
                output = self._build(args, kwargs)
            else:
                parts = micro_batches(self.build, args, kwargs, config.num_micro_batches)
                output = pack_outputs([self._build(*part) for part in parts])
            update.average(config.num_micro_batches)
            update.apply()
        except BaseException:
            update.abandon()
            raise
        return output

    def _build(self, args: Any, kwargs: dict[str, Any]) -> Any:
        dtype, scaler = self.config.amp_dtype, self._update.scaler
        with ExitStack() as stack:
            stack.enter_context(_leaving_grads(self._bystanders))
            if not self._is_settled:
                stack.enter_context(self._update.forbidding_steps())
            if dtype is not None:
                stack.enter_context(torch.autocast(self._device_type(), dtype))
            scaled = stack.enter_context(ScaledBackward(scaler)) if scaler is not None else None
            output = self.build(*args, **kwargs)
        if scaled is not None and not scaled.count:
            raise GraphError(
                f"{self._name}.build ran no loss.backward(), which is where the scaler acts · fix: call it"
            )
        return output

    def _device_type(self) -> str:
        for module in self._roots.values():
            for parameter in module.parameters():
                return str(parameter.device.type)
        return "cpu"

    def _addresses(self, args: Any, kwargs: dict[str, Any]) -> set[int]:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        for module in self._roots.values():
            tensors += [*module.parameters(), *module.buffers()]
        return {t.untyped_storage().data_ptr() for t in tensors if t.layout is torch.strided}


@contextmanager
def _leaving_grads(parameters: list[torch.Tensor]) -> Iterator[None]:
    """Leaves the gradients of parameters that no optimizer here owns as they are: they are another step's."""
    grads = [parameter.grad for parameter in parameters]
    try:
        yield
    finally:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
