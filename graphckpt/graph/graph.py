"""Graph: the user names modules and optimizers in `__init__` and the step in `build`; a call is one training step."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Unpack, overload
from weakref import WeakKeyDictionary

import torch
from torch import nn

from graphckpt.blocks.proxy import BlockTree, unwrap
from graphckpt.checks.comparison import Verification
from graphckpt.engine.values import report_differences
from graphckpt.errors import GraphError, bullets
from graphckpt.graph.config import GraphConfig
from graphckpt.graph.out_of_memory import call_or_replan
from graphckpt.graph.step import Setup, Step, StepCall, running_graph
from graphckpt.graph.step_state import verify_graph
from graphckpt.graph.text import DebugLog, graph_text
from graphckpt.graph.update import Update
from graphckpt.planning.options import OLD_NAMES, PlanOptions, PlanOptionsDict, lists_options

if TYPE_CHECKING:
    from graphckpt.budget import Budget
    from graphckpt.graph.auto_plan import AutoPlan
    from graphckpt.ledger.explanation import Explanation
    from graphckpt.planning.plan import Plan
    from graphckpt.simulation.profile import Device

_OWN = frozenset({"_auto_plan", "_debug", "_name", "_roots", "_step", "_tree", "_update", "config"})


class Graph:
    """One training step over modules, like OneFlow's ``nn.Graph``, with a policy on each block.

    Subclass it; in ``__init__`` call ``super().__init__()`` first, then assign modules (they become blocks), set
    policies and add optimizers; define ``build``, with ``loss.backward()`` inside. Without an optimizer it is an
    evaluation graph, whose ``build`` runs without gradients.

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

    config: GraphConfig
    """Settings that hold for every call."""
    _name: str
    _auto_plan: AutoPlan | None
    _step: Step
    _tree: BlockTree
    _numbers: ClassVar[WeakKeyDictionary[type, Iterator[int]]] = WeakKeyDictionary()

    def __init__(
        self,
        *,
        debug_v_level: int = -1,
        debug_ranks: int | list[int] | None = None,
        debug_max_py_stack_depth: int = 2,
        debug_only_user_py_stack: bool = True,
        debug_op_repr_with_py_stack: bool = False,
    ) -> None:
        self._begin({})
        self.debug(
            debug_v_level,
            ranks=debug_ranks,
            max_py_stack_depth=debug_max_py_stack_depth,
            only_user_py_stack=debug_only_user_py_stack,
            op_repr_with_py_stack=debug_op_repr_with_py_stack,
        )

    def _begin(self, roots: dict[str, nn.Module], settings: dict[str, Any] | None = None) -> None:
        name = f"{type(self).__name__}_{next(Graph._numbers.setdefault(type(self), count()))}"
        # Past `__setattr__`, which takes what a user assigns.
        fields, setup = self.__dict__, Setup()
        fields["config"] = GraphConfig(setup.mark_stale, **(settings or {}))
        fields["_name"] = name
        fields["_roots"] = roots
        fields["_tree"] = BlockTree(roots, setup.mark_stale)
        fields["_update"] = Update(name)
        fields["_debug"] = DebugLog()
        fields["_step"] = Step(name, roots, self._tree, self._update, self.config, self._debug, setup)
        fields["_auto_plan"] = None

    # What a subclass defines ------------------------------------------------------------------------------------------

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Defines the step. Inside, the attributes are the real modules."""
        raise NotImplementedError(
            f"{type(self).__name__}.build() is missing · fix: define build(self, ...), with loss.backward() inside"
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
        if name in _OWN:
            raise AttributeError(f"{where}: the Graph itself uses this name · fix: choose another")
        if isinstance(value, torch.optim.Optimizer):
            raise AttributeError(
                f"{where}: an Optimizer cannot be an attribute of a Graph · fix: use add_optimizer(...)"
            )
        if isinstance(value, torch.Tensor):
            raise AttributeError(
                f"{where}: a Tensor cannot be an attribute of a Graph · fix: hold it in an nn.Module and assign that"
            )
        if not isinstance(value, nn.Module):
            if name in self._roots:
                del self._roots[name]
                self._step.setup.mark_stale()
            elif self._step.captured is not None and not self._step.is_running and self.__dict__.get(name) is not value:
                self._step.setup.mark_stale()  # a capture holds what `build` reads as constants
            super().__setattr__(name, value)
            return
        if self._step.is_running:
            raise AttributeError(f"{where}: build() cannot add modules · fix: assign it in __init__")
        if not name or "." in name:
            raise KeyError(f"{where}: expected a name without dots, got {name!r} · fix: rename it")
        if name in self.__dict__ or hasattr(type(self), name):
            raise KeyError(f"{where}: there is an attribute of this name already · fix: choose another")
        self._roots[name] = value
        self._step.setup.mark_stale()

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__
        if "_roots" not in fields:
            raise AttributeError(f"{type(self).__name__} is not initialised · fix: call super().__init__() first")
        if name in fields["_roots"]:
            return fields["_tree"].wrap(fields["_roots"][name])
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def __delattr__(self, name: str) -> None:
        if name not in self._roots:
            super().__delattr__(name)
            return
        if self._step.is_running:
            raise AttributeError(f"{type(self).__name__}.{name}: build() cannot remove modules · fix: do it outside")
        del self._roots[name]
        self._step.setup.mark_stale()

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._roots})

    def add_optimizer(self, optim: torch.optim.Optimizer, *, lr_sch: Any = None, is_sparse: bool = False) -> None:
        """Makes this a training graph: after ``build`` it clips, steps, zeroes gradients and steps ``lr_sch``, once.

        A param group with ``clip_grad_max_norm`` (and ``clip_grad_norm_type``, 2.0 by default) is clipped by its
        norm. A key of a group that resembles these two, and that the optimizer does not have itself, is an error.

        Args:
            optim: Any optimizer; several can be added.
            lr_sch: Its scheduler, if any. Neither may be stepped by hand as well.
            is_sparse: Ignored; OneFlow has it.

        Raises:
            GraphError: It is not an optimizer, the scheduler is another's, it shares a parameter with another, or a
                clipping key is misspelt.
        """
        del is_sparse
        self._update.add(optim, lr_sch)
        self.config.training = True
        self._step.setup.mark_stale()

    def set_grad_scaler(self, grad_scaler: torch.amp.GradScaler | None = None) -> None:
        """Scales the losses whose ``backward()`` is called in ``build``; an overflow skips the step and the schedule.

        Raises:
            GraphError: It is not a ``torch.amp.GradScaler``.
        """
        if grad_scaler is not None and not isinstance(grad_scaler, torch.amp.GradScaler):
            raise GraphError(
                f"{self._name}.set_grad_scaler: expected a GradScaler, got {type(grad_scaler).__name__} · "
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
        """Prints the work of the next calls: 0 stages, 1 each block's inputs and outputs, 2 each op, 3 its line too."""
        self._debug.configure(v_level, ranks, max_py_stack_depth, only_user_py_stack, op_repr_with_py_stack)
        self._step.setup.is_done = False

    # What users call --------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one step and returns the outputs of ``build``, detached from the autograd graph."""
        fields = self.__dict__  # a look-up through __getattr__'s class costs more
        step = fields["_step"]
        config = fields["config"]
        replans = config.on_out_of_memory == "replan" and config.training
        # The fast path, of all calls but the first few: no object is made for it.
        if step.setup.is_done and running_graph.get() is None and not replans:
            return step.call(fields, self.build, args, kwargs)
        call = StepCall(fields, self.build, args, kwargs)
        is_nested = running_graph.get() is not None
        has_planner = config.memory_budget is not None or fields["_auto_plan"] is not None
        with self._planner().planning(call) if has_planner and not is_nested else nullcontext():
            if replans and not is_nested:
                return call_or_replan(step, lambda *failed, **how: self._planner().replan(*failed, **how), call)
            return step.call_with_setup(call)

    def explain(self, plot: str | None = None, *, show: bool = True) -> Explanation:
        """Prints and returns the bytes that each block keeps, where, and their cost, as measured in the first calls.

        It prints the table unless ``show`` is false. The object that it returns prints as the same table, and a
        notebook shows it as one: there, ``explain(show=False)`` as the last line of a cell suffices.

        Args:
            plot: File for a plot of the live bytes over the step, ``.png``, ``.svg`` or ``.html``.
            show: Whether to print.

        Raises:
            GraphError: The graph has no optimizer, or no call was recorded.
        """
        if not self.config.training:
            raise GraphError(
                f"{self._name}.explain: an evaluation graph keeps nothing · fix: explain the training graph"
            )
        watcher = self._step.watcher
        if watcher is None:
            raise GraphError(
                f"{self._name}.explain: no step has been measured yet · "
                "fix: call the graph inside `with graph.measure():`"
            )
        return watcher.explain(plot, show=show, capture=self._step.capture_text)

    def measure(self) -> AbstractContextManager[None]:
        """Records the calls in the ``with`` block op by op; :meth:`explain` then shows the last of them."""
        return self._step.measure()

    def verify(self, *args: Any, steps: int = 3, **kwargs: Any) -> Verification:
        """Compares ``steps`` steps on these inputs with plain ones, without policies and capture, in every bit.

        Parameters, optimizers, schedules and RNG state are put back to what they were. Where the step is captured,
        the calls before the capture come first, so that replays are what is compared.

        Raises:
            GraphError: Something differs; the message names the step, the block and the tensor.
        """
        return verify_graph(
            self._step, self.build, lambda: self._step.call(self.__dict__, self.build, args, kwargs), steps
        )

    @overload  # of two: an editor completes the options, which inputs by keyword would hide
    def plan(
        self,
        *args: Any,
        memory_budget: Budget,
        device: Device = None,
        restore: Iterable[Any] | None = None,
        **options: Unpack[PlanOptionsDict],
    ) -> Plan: ...

    @overload
    def plan(
        self,
        *args: Any,
        memory_budget: Budget,
        device: Device = None,
        restore: Iterable[Any] | None = None,
        **kwargs: Any,
    ) -> Plan: ...

    @lists_options(PlanOptionsDict)
    def plan(
        self,
        *args: Any,
        memory_budget: Budget,
        device: Device = None,
        restore: Iterable[Any] | None = None,
        **kwargs: Any,
    ) -> Plan:
        """Chooses the policies of the layers for inputs like these; ``plan.apply()`` sets them on the blocks.

        The step runs a few times; parameters, optimizers, schedules, RNG state and what ``build`` reaches are restored
        at the end. Applying the plan replaces the flags of the layers and of the modules inside them. With
        ``config.memory_budget`` a Graph plans by itself, from its first updates and without running any of them twice;
        an applied plan ends that.

        Args:
            args: inputs of a call.
            memory_budget: bytes, ``"12GiB"``, ``"50%"`` of the device's memory, ``0.6`` of the plain step's peak,
                ``"max"`` or ``"min"``. See :func:`graphckpt.plan`.
            device: a device profile such as ``"h200"``, for which the step is simulated; ``None`` runs it.
            restore: objects that ``build`` changes and that are not found, as of :func:`graphckpt.plan`.
            kwargs: inputs of a call, and fields of :class:`~graphckpt.planning.PlanOptions`, such as
                ``select="model.layers.*"``. With ``compile=None`` blocks are compiled as their flags say.

        Raises:
            ConfigError: an argument cannot be used, or no layers were found.
            GraphError: the graph has no optimizer.
            PlanError: no plan fits; the message names the lowest possible peak and what sets it.
        """
        names = (*PlanOptions.names(), *OLD_NAMES)
        options = {name: kwargs.pop(name) for name in names if name in kwargs}
        call = StepCall(self.__dict__, self.build, args, kwargs)
        return self._planner().plan(call, memory_budget, options, device, restore)

    def _planner(self) -> AutoPlan:
        planner = self._auto_plan
        if planner is None:
            from graphckpt.graph.auto_plan import AutoPlan  # noqa: PLC0415  # a Graph without a budget needs no planner

            planner = self.__dict__["_auto_plan"] = AutoPlan(self._step, self._tree)
        return planner

    @property
    def name(self) -> str:
        """The class name and a number, counted per class."""
        return self._name

    @property
    def training(self) -> bool:
        """Whether an optimizer was added."""
        return self.config.training

    @property
    def is_compiled(self) -> bool:
        """Whether the graph has been called."""
        return self._step.num_calls > 0

    def state_dict(self, destination: Any = None) -> OrderedDict[str, Any]:
        """Returns each module's state under its attribute name, and that of optimizers, schedulers and scaler."""
        self._step.count_steps()
        report_differences()
        state: OrderedDict[str, Any] = OrderedDict() if destination is None else destination
        for name, module in self._roots.items():
            state[name] = module.state_dict()
        if self._update.optimizers:
            state.update(self._update.state_dict())
        return state

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Loads the result of :meth:`state_dict`, before the first call or after any.

        Raises:
            GraphError: ``strict``, and a key is missing or unknown. Nothing has been loaded then.
        """
        roots, expected = self._roots, self.state_dict()
        missing, unknown = sorted(set(expected) - set(state_dict)), sorted(set(state_dict) - set(expected))
        for name in [name for name in roots if name in state_dict]:
            missing += [f"{name}.{key}" for key in expected[name] if key not in state_dict[name]]
            unknown += [f"{name}.{key}" for key in state_dict[name] if key not in expected[name]]
        shapes = [
            f"{name}.{key}: expected shape {tuple(expected[name][key].shape)}, got {tuple(value.shape)}"
            for name in roots
            for key, value in (state_dict.get(name) or {}).items()
            if isinstance(value, torch.Tensor) and key in expected[name] and value.shape != expected[name][key].shape
        ]
        named = {"missing": missing, "unexpected": unknown} if strict else {}
        faults = [f"{word} {', '.join(map(str, keys))}" for word, keys in named.items() if keys] + shapes
        if faults:
            fix = "fix: load a state of this Graph" + (", or strict=False" if strict and not shapes else "")
            raise GraphError(bullets(f"{self._name}.load_state_dict: nothing is loaded", [*faults, fix]))
        for name, module in roots.items():
            if name in state_dict:
                module.load_state_dict(state_dict[name], strict=strict)
        self._update.load_state_dict(state_dict)

    # Wrappers, captures and records are of this Graph alone: the copy has the modules, the flags of its blocks as plain
    # fields, and the optimizers. `deepcopy` and `pickle` copy all of them together, so that the parameters of the
    # copied optimizers are those of the copied modules.
    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy or a pickle needs: it starts as if it had not been called, under another name."""
        self._step.count_steps()
        return {
            "attributes": {key: value for key, value in self.__dict__.items() if key not in _OWN},
            "roots": dict(self._roots),
            "policies": self._tree.policies(),
            "settings": self.config.settings(),
            "update": self._update.parts(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin(dict(state["roots"]), state["settings"])
        self.__dict__.update(state["attributes"])
        for module, path, fields in state["policies"]:
            self._tree.config(module, path).update(fields)
        self._update.take_over(state["update"])

    def __repr__(self) -> str:
        return graph_text(type(self).__name__, self._name, self.config, self._roots, self._tree, self._step.inputs)

    @staticmethod
    def trace(func: Callable[..., Any]) -> Graph:
        """Makes an evaluation graph of a plain function; used as a decorator."""
        if not inspect.isroutine(func):
            raise GraphError(f"Graph.trace: expected a function, got {type(func).__name__} · fix: decorate a function")
        kind = type(func.__name__, (Graph,), {"build": staticmethod(func), "__doc__": func.__doc__})
        return kind()  # type: ignore[no-any-return]

    @staticmethod
    def with_dynamic_input_shape(*, size: int = 10, enable_shared: bool = True) -> Callable[..., Any]:
        """Accepts OneFlow's decorator of ``__init__``: inputs of changing shapes are always allowed here."""
        del size, enable_shared
        return lambda init: init
