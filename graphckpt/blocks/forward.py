"""The wrappers around one module's forward: one applies its rule, the other lets a record begin and end with it."""

from __future__ import annotations

import copy
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from types import MethodType
from typing import Any, TypeAlias, final

import torch
from torch import nn

from graphckpt._compat import is_transformed
from graphckpt._compat_compiler import constant_in_graphs, is_exporting, never_compiled
from graphckpt.blocks.compiled import SHARE, CompiledForward
from graphckpt.engine.block import BlockContext
from graphckpt.engine.execution import call_numbers, innermost, running
from graphckpt.engine.objects import replaced
from graphckpt.engine.saved import joined_blocks
from graphckpt.errors import NOT_SCRIPTABLE, ConfigError
from graphckpt.rules.base import Rule
from graphckpt.rules.basic import Joined, Keep
from graphckpt.rules.in_graph import ForwardInGraph, exclude_in_graph
from graphckpt.stores.placement import Placement
from graphckpt.undo import Undo, scope

_FLAG = "gradient_checkpointing"  # an attribute of Transformers' modules: whether they checkpoint themselves


class _Disabled(threading.local):
    """Whether policies are off in this thread. The compiler guards on it, but cannot read a ``ContextVar``."""

    def __init__(self) -> None:
        self.is_on = False  # of the instance: the compiler guards on no attribute of a class


_disabled = _Disabled()
# The same outside of graphs. A recomputation runs in the context of its call: `disable_checkpointing` around backward
# says nothing to it, and one that a block's forward enters does.
_disabled_in_context = ContextVar("_disabled_in_context", default=False)

# Note [Blocks in a compiled model]
# Under `torch.compile` of a model, the compiler inlines `_run_in_graph`, and PyTorch's own checkpoint, which it knows,
# recomputes the block as a part of the graph. Where it cannot trace the policy, or the block's forward breaks the
# graph, it gives up and calls `_run_in_graph` as it is. That one is marked as never to be compiled, with all that it
# calls: the engine acts, and the block runs uncompiled. PyTorch's checkpoint, called so, would move buffers and
# attributes twice. `__call__` is not marked: it is what the compiler meets first if a layer is compiled in place. Where
# the compiler gives up on a frame for good, it is called as it is, so `_run` is marked too.


# Note [Wrappers of other libraries]
#
# A wrapper is the module's `__dict__["forward"]`. Other libraries put theirs there as well, as accelerate's hooks do:
#
#   event                                 `forward` of the module       the wrapper W
#   W.install()                           W -> that of the class        acts
#   another library wraps the module      X -> W -> that of the class   acts
#   W.uninstall()                         X -> W -> that of the class   is beneath: X refers to it, so it stays and only
#                                                                       passes calls on
#   W.install()                           X -> W -> that of the class   acts from its place: over X, which calls it, it
#                                                                       would call itself without end
#   X goes, then W.uninstall()            that of the class             is out
#
# Among wrappers of this package, a BlockForward calls what lies below all of them (`_unwrapped`): of two policies on a
# module, the later one acts alone. So what must see all calls, a WatchedForward, is installed after the policies.


class ForwardWrapper(ABC):
    """The ``forward`` of a module instance, not of its class: type, hooks and ``state_dict`` keys do not change.

    It refers to the module weakly, so that a deleted model is freed at once, and is copied and pickled with it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._is_beneath = False
        if isinstance(module, torch.jit.ScriptModule):  # its class has no forward, and finds that of its own once
            module.__dict__.setdefault("forward", module.forward)
        self._cover(module.__dict__.get("forward"))

    # `_wrapped` is what the module had before, for `uninstall` to put back, `_inner` what this wrapper calls. They are
    # `None` for the forward of the class, which `_function` binds in each call: a bound method would hold the module.
    def _cover(self, forward: Callable[..., Any] | None) -> None:
        self._wrapped = forward
        self._inner = forward

    @property
    def module(self) -> nn.Module | None:
        return self._module()

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The plain forward, for ``inspect.signature``, by which trainers see which arguments a model takes."""
        return self._function()

    @property
    def __code__(self) -> Any:
        """The code of the plain forward, after which ``torch.export`` names its guards."""
        return self._function().__code__

    @property
    def _torchscript_modifier(self) -> Any:
        """Raises an error for ``torch.jit.script``, which alone reads this attribute."""
        raise ConfigError(NOT_SCRIPTABLE)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward."""
        return (self._run_in_graph if torch.compiler.is_compiling() else self._run)(args, kwargs)

    @abstractmethod
    def _run(self, args: Any, kwargs: dict[str, Any]) -> Any: ...

    @abstractmethod
    def _run_in_graph(self, args: Any, kwargs: dict[str, Any]) -> Any: ...

    def _function(self) -> Callable[..., Any]:
        if self._inner is not None:
            return self._inner
        module = self._module()
        if module is None:
            raise ConfigError(
                "the forward of a module with a policy was called, but the module is deleted · fix: call the module "
                "itself, or take its forward before apply()"
            )
        return MethodType(type(module).forward, module)

    def install(self) -> None:
        module = self._module()
        if module is None:
            return
        fields = module.__dict__
        covered = fields.get("forward")
        if covered is self:
            return
        if self._is_beneath and covered is not None:  # see Note [Wrappers of other libraries]
            return
        if covered is not self._wrapped:  # another library has wrapped or unwrapped the module since the last time
            self._cover(covered)
        fields["forward"] = self

    def uninstall(self) -> None:
        """Removes this wrapper. If another one was installed over it since, it stays and does nothing."""
        module = self._module()
        if module is None:
            return
        present = module.__dict__.get("forward")
        self._is_beneath = present is not None and present is not self
        if present is not self:
            return
        if self._wrapped is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = self._wrapped


@final
class BlockForward(ForwardWrapper):
    """Runs the forward of a block under its rule."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        rule: Rule,
        placement: Placement | None = None,
        *,
        compile_options: dict[str, Any] | None = None,
        determinism_check: str = "default",
        early_stop: bool = True,
        only_compiles: bool = False,
        is_excluded: bool = False,
    ) -> None:
        super().__init__(module)
        self._is_on = True
        # Numbers of calls: it is off in those from the first on, up to the second if it is on by now.
        self._off_from = self._off_until = 0
        self._native: list[weakref.ref[nn.Module]] = []  # modules below that may checkpoint themselves
        self._context: BlockContext | None = None
        self.name = name
        self.rule = rule
        joined_blocks.may_exist |= isinstance(rule, Joined)
        self.placement = placement
        """Its placement; ``None`` if the blocks around it decide."""
        self.compile_options = compile_options
        """Arguments of ``torch.compile`` for its forward; ``None`` if it is not compiled."""
        self.determinism_check = determinism_check
        """The comparison that its recomputations make: see :mod:`graphckpt.engine.sampling`."""
        self.early_stop = early_stop
        """Whether its recomputations end with the last tensor that backward needs."""
        self.only_compiles = only_compiles
        """Whether it only compiles its module, which is recomputed, if at all, with the block around it."""
        self.is_excluded = is_excluded
        """Whether it is a child of a recomputed block that is not recomputed with it."""
        self.is_in_graph = False
        """Whether ``torch.compile`` has made it a part of the graph of a larger module, with its policy."""
        self.num_calls = 0
        """Calls with gradients on in which its policy acted; those in a graph of ``torch.compile`` do not count."""
        self.is_copied = True
        """Whether copies of the module have the policy too."""
        self._compiled: Callable[..., Any] | None = None

    @property
    def context(self) -> BlockContext:
        """The state that all calls of the block share, created on first use."""
        if self._context is None:
            module = self._module()
            # The module is freed by now if the program has replaced it, and another library's wrapper still calls this.
            modules = [] if module is None else [module]
            self._native = [weakref.ref(m) for each in modules for m in each.modules() if hasattr(m, _FLAG)]
            store = None if self.placement is None else self.placement.store
            self._context = BlockContext(
                self.name, modules, store, determinism_check=self.determinism_check, early_stop=self.early_stop
            )
        return self._context

    def _successor(self) -> BlockForward | None:
        """Returns the policy that a hook before this forward has set in place of this one: it acts on this call."""
        module = self._module()
        return None if module is None else policy_of(module)

    @property
    def is_on(self) -> bool:
        """Whether the module has the policy: another library's wrapper may keep this one in place after its end."""
        return self._is_on

    def _cover(self, forward: Callable[..., Any] | None) -> None:
        self._wrapped = forward
        self._inner = _unwrapped(forward)

    @never_compiled
    def _run(self, args: Any, kwargs: dict[str, Any]) -> Any:
        function = self._function()
        run = innermost() if running.get() is not None else None
        # A recomputation follows the policies of its original forward, whatever has been switched since: else the ops
        # of an excluded child could count as ops of the block around it, and fill the holders of the ops behind it.
        is_on = self._was_on(run.frame.number) if run is not None and run.is_recomputation else self._is_on
        if not (is_on or self._is_beneath) and (present := self._successor()) is not None:
            return present._run(args, kwargs)
        if self.compile_options is not None and is_on:
            function = self._compiled = self._compiled or CompiledForward(function, self.compile_options)
        if self.only_compiles or not is_on or _disabled_in_context.get():
            return function(*args, **kwargs)
        if not torch.is_grad_enabled():
            return self.rule.run_without_gradients(self._context or self.context, function, args, kwargs)
        context = self._context or self.context
        if self._native or is_transformed():
            under_rule = self._under_rule(context, function)
            if under_rule is None:
                return function(*args, **kwargs)
            function = under_rule
        self.num_calls += 1
        return self.rule.run(context, function, args, kwargs)

    @never_compiled
    def _run_in_graph(self, args: Any, kwargs: dict[str, Any]) -> Any:
        if not torch.compiler.is_compiling():
            return self._run(args, kwargs)
        module = self._module()
        assert module is not None
        function = ForwardInGraph(module, self._inner, has_excluded=self._has_excluded())
        if not self._is_on or checkpointing_is_off() or is_exporting():  # the program has no policies
            return function(*args, **kwargs)
        why = self._graph_break(torch.is_grad_enabled())
        if why:
            torch._dynamo.graph_break(msg=why)  # an error with `fullgraph=True`
        if self.only_compiles or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if self.is_excluded:
            return exclude_in_graph(function, args, kwargs)
        return self.rule.run_in_graph(module, function, args, kwargs)

    @constant_in_graphs
    def _has_excluded(self) -> bool:
        return any(forward.is_excluded for forward in self._forwards_below())

    def _forwards_below(self) -> list[BlockForward]:
        module = self._module()
        assert module is not None
        forwards = map(policy_of, list(module.modules())[1:])
        return [forward for forward in forwards if forward is not None]

    @constant_in_graphs
    def _graph_break(self, has_gradients: bool) -> str:
        """Says why the block cannot be a part of a graph of ``torch.compile``; empty if it can."""
        reasons: list[str | None] = []
        if SHARE in (self.compile_options or ()):
            reasons.append(f"{SHARE} is its own")
        if not self.only_compiles:
            reasons.append(self.rule.graph_break(has_gradients=has_gradients))
        if not self.only_compiles and has_gradients:
            if self.placement is not None and not self.placement.is_plain:
                reasons.append("it has a store")
            if self.is_excluded and innermost() is not None:  # that block is recomputed as it is
                reasons.append("it is excluded from the block around it")
            inner = [each for each in self._forwards_below() if not each.only_compiles and each.rule.name != "full"]
            is_other = any(f.rule.name != "keep" or not (f.placement is None or f.placement.is_plain) for f in inner)
            if is_other and not isinstance(self.rule, Keep):
                reasons.append("a block within it has a policy")
        why = ", ".join(reason for reason in reasons if reason)
        if not why:
            self.is_in_graph |= has_gradients
            if has_gradients and self.determinism_check == "values" and not isinstance(self.rule, Keep):
                self.context.note(
                    "determinism_check='values' has no effect here: torch.compile recomputes it as a part of its graph"
                )
            return ""
        self.context.note(f"torch.compile leaves it out of the graph around it and runs it as it is: {why}")
        return f"{self.name}: {why} · fix: compile block by block, with graphckpt's field `compile`"

    def _under_rule(self, context: BlockContext, function: Callable[..., Any]) -> Callable[..., Any] | None:
        """Returns what the rule is to run; ``None`` if the forward is to run without it."""
        if is_transformed():
            context.note("torch.func or forward-mode AD is around it: it runs as it is, and all is saved")
            return None
        modules = [module for ref in self._native if (module := ref()) is not None and checkpoints_itself(module)]
        if not modules:
            return function
        owner = getattr(function, "__self__", None)
        # Layers of older Transformers checkpoint in `__call__`, which has called this by then. Newer ones do so in the
        # `forward` of their class, which this calls: there `_Suspended` is in time.
        if owner in modules and type(owner).__call__ is not nn.Module.__call__:
            context.note("its own gradient checkpointing replaces this policy: disable it on the model")
            return None
        context.note("the model's own gradient checkpointing is on as well: this policy replaces it")
        return _Suspended(function, modules)

    def install(self) -> None:
        if not self._is_on:
            self._is_on, self._off_until = True, next(call_numbers)
        super().install()

    def uninstall(self) -> None:
        if self._is_on:
            self._is_on, self._off_from = False, next(call_numbers)
        super().uninstall()

    def _was_on(self, number: int) -> bool:
        """Whether it acted in the call with this number. Only the last time that it was off is known."""
        return number < self._off_from or (self._is_on and number >= self._off_until)

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockForward:
        # `deepcopy` notes the copy of a module before it copies what the module holds.
        twin = memo.get(id(self._module()))
        if twin is None:
            return self
        _, (_, *settings), state = self.__reduce__()
        wrapper = BlockForward(twin, *copy.deepcopy(settings, memo))
        wrapper.__setstate__(copy.deepcopy(state, memo))
        return wrapper

    def __reduce__(self) -> tuple[Any, ...]:
        module = self._module()
        if not self.is_copied:
            return (
                BlockForward,
                (module, self.name, Keep()),
                (self._wrapped, False, None, False, False, self.determinism_check, self.early_stop),
            )
        flags = self.only_compiles, self.is_excluded, self.determinism_check, self.early_stop
        return (
            BlockForward,
            (module, self.name, self.rule, self.placement),
            (self._wrapped, self._is_on, self.compile_options, *flags),
        )

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        wrapped, self._is_on, self.compile_options, self.only_compiles, self.is_excluded, *later = state
        self.determinism_check = later[0] if later else "default"  # of a model that an older version has pickled
        self.early_stop = later[1] if len(later) > 1 else True  # likewise
        self._cover(wrapped)


Watcher: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], AbstractContextManager[None]]
"""Called with the arguments of a call; returns the context that the forward runs in."""


@final
class WatchedForward(ForwardWrapper):
    """Runs the forward of a model within the contexts of those that watch it. Copies of the model are not watched.

    Hooks would do, but ``torch.cuda.make_graphed_callables`` takes no module that has any.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._watchers: list[weakref.WeakMethod[Watcher]] = []

    @classmethod
    def watch(cls, module: nn.Module, watcher: Watcher) -> Callable[[], None]:
        """Has a bound method, which is held weakly, watch a module; returns a function that ends this before."""
        forward = module.__dict__.get("forward")
        if not isinstance(forward, cls):
            forward = cls(module)
            forward.install()

        def end(*_: object) -> None:  # also called, with the weak reference, when the watcher is freed
            forward._watchers = [one for one in forward._watchers if one is not entry]
            if not forward._watchers:
                forward.uninstall()

        entry = weakref.WeakMethod(watcher, end)
        forward._watchers.append(entry)
        return end

    @never_compiled
    def _run(self, args: Any, kwargs: dict[str, Any]) -> Any:
        function = self._function()
        if not self._watchers:  # of a copy
            self.uninstall()
        with ExitStack() as stack:
            for entry in self._watchers:
                if (watcher := entry()) is not None:
                    stack.enter_context(watcher(args, kwargs))
            return function(*args, **kwargs)

    def _run_in_graph(self, args: Any, kwargs: dict[str, Any]) -> Any:
        module = self._module()
        assert module is not None
        return ForwardInGraph(module, self._inner, has_excluded=False)(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> WatchedForward:
        twin = memo.get(id(self._module()))
        if twin is None:
            return self
        wrapper = WatchedForward(twin)
        wrapper._cover(copy.deepcopy(self._wrapped, memo))
        return wrapper

    def __reduce__(self) -> tuple[Any, ...]:
        return WatchedForward, (self._module(),), self._wrapped

    def __setstate__(self, wrapped: Callable[..., Any] | None) -> None:
        self._cover(wrapped)


def policy_of(module: nn.Module) -> BlockForward | None:
    """Returns the wrapper of the policy that acts on a module itself."""
    forward = module.__dict__.get("forward")
    while isinstance(forward, ForwardWrapper):
        if isinstance(forward, BlockForward) and forward.is_on:
            return forward
        forward = forward._wrapped
    return None


@final
class _Suspended:
    """A forward during which the gradient checkpointing of some modules' own, as in Transformers, is off."""

    __slots__ = ("__self__", "__wrapped__", "_modules")

    def __init__(self, function: Callable[..., Any], modules: list[nn.Module]) -> None:
        self.__wrapped__ = function  # for inspect.signature, which names arguments
        self.__self__ = getattr(function, "__self__", None)
        self._modules = modules

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a part of the forward likewise, for rules that call children one by one."""
        return _Suspended(function, self._modules)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with replaced([module for module in self._modules if module.__dict__.get(_FLAG)], _FLAG, value=False):
            return self.__wrapped__(*args, **kwargs)


def checkpoints_itself(module: nn.Module) -> bool:
    return module.training and bool(module.__dict__.get(_FLAG))


@scope
def disable_checkpointing(undo: Undo) -> Iterator[None]:
    """Runs every forward in the ``with`` block as if no policy were set."""
    undo.append((setattr, (_disabled, "is_on", _disabled.is_on)))
    undo.append((_disabled_in_context.set, (_disabled_in_context.get(),)))
    _disabled.is_on = True
    _disabled_in_context.set(True)
    yield


def checkpointing_is_off() -> bool:
    """Whether forwards run as if no policy were set: in :func:`disable_checkpointing`, ``torch.func``, forward AD."""
    is_disabled = _disabled.is_on if torch.compiler.is_compiling() else _disabled_in_context.get()
    return is_disabled or is_transformed()


def _unwrapped(forward: Callable[..., Any] | None) -> Callable[..., Any] | None:
    while isinstance(forward, ForwardWrapper):  # a Graph's policy replaces one that `apply` has set
        forward = forward._wrapped
    return forward
