"""The functions that people know from PyTorch and FairScale, with their signatures, on this engine."""

from __future__ import annotations

import inspect
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache, partial, reduce, wraps
from itertools import chain
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from graphckpt._compat_compiler import never_compiled
from graphckpt.blocks.forward import BlockForward, checkpointing_is_off, policy_of
from graphckpt.blocks.proxy import unwrap
from graphckpt.engine.block import BlockContext
from graphckpt.engine.execution import innermost
from graphckpt.engine.frame import Contexts, Frame
from graphckpt.engine.objects import attribute_of
from graphckpt.engine.sampling import CallSampler, parse_determinism_check
from graphckpt.errors import ConfigError, shown
from graphckpt.rules.basic import Full
from graphckpt.rules.in_graph import checkpoint_in_graph
from graphckpt.rules.segments import run_segments, run_segments_in_graph
from graphckpt.stores.host import Host
from graphckpt.stores.placement import Placement
from graphckpt.tree import ATOMS


@never_compiled
def checkpoint(
    function: Callable[..., Any] | None = None,
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Runs ``function`` so that backward recomputes it, like ``torch.utils.checkpoint.checkpoint``.

    Beyond PyTorch's: tensors in keyword arguments and containers are kept and checked like positional ones, random
    state is restored on every device in use, and buffers of the modules that ``function`` is bound to, wraps, closes
    over, names or gets as arguments are updated once, also in containers, dataclasses and attributes of objects.

    Args:
        function: Any callable. Without it, a decorator with the other settings is returned, as from torch 2.14 on.
            ``@checkpoint`` alone is one too, for functions that need arguments: ``checkpoint(function)`` calls others.
            For one of ``*args`` alone that is an error: write ``@checkpoint()``.
        *args: Its arguments.
        use_reentrant: Ignored: there is one implementation, which supports ``torch.autograd.grad``.
        context_fn: Returns two contexts, for the original forward and for the recomputation.
        determinism_check: What is compared in the recomputation. ``"none"``: nothing, as in PyTorch. ``"default"``:
            shapes and dtypes of all saved tensors, and the values of some calls: the first three of ``function``, and
            one in 64. ``"values"``: the values of every call.
        debug: Ignored: an error always names op and line.
        early_stop: ``False`` runs ``function`` to its end in the recomputation; so does
            ``torch.utils.checkpoint.set_checkpoint_early_stop(False)`` around the forward, for blocks of any rule too.
        preserve_rng_state: Ignored: RNG state is always restored, which costs a microsecond.
        respect_saved_tensors_hooks: What ``context_fn`` keeps does not pass through saved-tensor hooks around the call;
            ``True`` with it is an error.
        **kwargs: Its keyword arguments.

    Raises:
        ConfigError: A setting is not supported, arguments are passed without a function, or none to ``f(*args)``.
        RecomputeError: In backward, if the recomputation differs from the first.
    """
    if function is None and (args or kwargs):
        raise ConfigError(
            f"checkpoint: expected a function first, got only {shown(args or kwargs)} · fix: pass the function"
        )
    if function is None or (not args and not kwargs and _needs_arguments(function)):
        decorate = partial(
            _checkpointed,
            use_reentrant=use_reentrant,
            context_fn=context_fn,
            determinism_check=determinism_check,
            debug=debug,
            early_stop=early_stop,
            preserve_rng_state=preserve_rng_state,
            respect_saved_tensors_hooks=respect_saved_tensors_hooks,
        )
        return decorate if function is None else decorate(function)
    if torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling():
        # Called by the compiler, which traces this in place of PyTorch's function, where a program has replaced that.
        options: dict[str, Any] = {
            "early_stop": early_stop,
            "preserve_rng_state": preserve_rng_state,
            "context_fn": context_fn,
        }
        if respect_saved_tensors_hooks is not None:
            options["respect_saved_tensors_hooks"] = respect_saved_tensors_hooks
        return torch_checkpoint(function, *args, use_reentrant=False, **options, **kwargs)
    del use_reentrant, debug, preserve_rng_state
    parse_determinism_check(determinism_check)
    if respect_saved_tensors_hooks and context_fn is not noop_context_fn:
        raise ConfigError(
            "checkpoint: expected respect_saved_tensors_hooks=False with a context_fn, got True · fix: leave it out, "
            "or set the rule 'selective' on a module, whose kept results pass through the hooks around it"
        )
    if not torch.is_grad_enabled() or checkpointing_is_off():
        return function(*args, **kwargs)
    return _run(function, args, kwargs, context_fn, early_stop=early_stop, determinism_check=determinism_check)


def _needs_arguments(function: Callable[..., Any]) -> bool:
    """Whether a call without arguments would fail, so that ``@checkpoint`` without parentheses can be told from one."""
    if torch.compiler.is_compiling() or not isinstance(function, FunctionType):
        return False
    code = function.__code__  # not the signature, which is that of `__wrapped__`
    needs_some = code.co_argcount > len(function.__defaults__ or ())
    needs_some |= code.co_kwonlyargcount > len(function.__kwdefaults__ or ())
    if not needs_some and not code.co_argcount and code.co_flags & inspect.CO_VARARGS:
        if hasattr(function, "__wrapped__"):  # it passes on what it gets
            return _needs_arguments(function.__wrapped__)
        name = function.__name__
        raise ConfigError(
            f"checkpoint: expected arguments for {name}(*{code.co_varnames[code.co_kwonlyargcount]}), got none · "
            f"fix: @checkpoint() to decorate it, checkpoint(lambda: {name}()) to call it"
        )
    return needs_some


def _checkpointed(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(function, *args, **settings, **kwargs)

    return run


@never_compiled
def _run(function: Any, args: Any, kwargs: dict[str, Any], context_fn: Any, **settings: Any) -> Any:
    if torch.compiler.is_compiling():  # see Note [Blocks in a compiled model]
        return checkpoint_in_graph(function, args, kwargs, context_fn)
    contexts = None if context_fn is noop_context_fn else _GivenContexts(*context_fn())
    return Frame(_context(function, *args, *kwargs.values()), function, contexts, **settings).run(args, kwargs)


@final
class _GivenContexts(Contexts):
    """The two contexts of a ``context_fn``. They check versions themselves."""

    def __init__(self, first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> None:
        self._first, self._second = first, second
        if hasattr(first, "respect_saved_tensors_hooks"):  # 2.14 warns of the frame's hooks (pytorch#190581)
            first.respect_saved_tensors_hooks = False

    def original_forward(self, frame: Frame) -> AbstractContextManager[Any]:
        del frame
        return self._first

    def recomputation(self, frame: Frame) -> AbstractContextManager[Any]:
        del frame
        return self._second


@never_compiled
def checkpoint_sequential(
    functions: nn.Sequential | Sequence[Callable[..., Any]],
    segments: int,
    input: Any,  # noqa: A002  # PyTorch's name for it
    use_reentrant: bool | None = None,
    *,
    determinism_check: str = "default",
    **kwargs: Any,
) -> Any:
    """Runs a chain in ``segments`` segments and recomputes all but the last, like PyTorch's function.

    ``determinism_check`` is that of :func:`checkpoint`.

    Raises:
        ConfigError: ``segments`` is not an int from 1 to the number of functions, a value is not valid, or a keyword
            is unknown.
    """
    del use_reentrant
    parse_determinism_check(determinism_check)
    kwargs.pop("preserve_rng_state", None)
    if kwargs:
        raise ConfigError(f"checkpoint_sequential has no argument {next(iter(kwargs))!r} · fix: remove it")
    chain: list[Any] = list(functions.children() if isinstance(functions, nn.Sequential) else functions)
    if isinstance(segments, bool) or not isinstance(segments, int) or not 1 <= segments <= len(chain):
        raise ConfigError(
            f"segments: expected an int from 1 to {len(chain)}, the number of functions, got {shown(segments)} · "
            "fix: use fewer segments"
        )
    if not torch.is_grad_enabled() or checkpointing_is_off():
        return reduce(lambda value, function: function(value), chain, input)
    return _run_chain(functions, chain, segments, input, determinism_check)


@never_compiled
def _run_chain(functions: Any, chain: list[Any], segments: int, value: Any, determinism_check: str) -> Any:
    if torch.compiler.is_compiling():  # see Note [Blocks in a compiled model]
        return run_segments_in_graph(chain, segments, value)
    is_module = isinstance(functions, nn.Sequential)
    name = "checkpoint_sequential"
    context = _context(functions) if is_module else BlockContext(name, (), learns=False, sampler=_sampler_of(name))
    # Not on the context, which other calls here share: one may run meanwhile, in another thread or in `chain`.
    return run_segments(context, chain, segments, value, determinism_check=determinism_check)


def checkpoint_wrapper(
    module: nn.Module, offload_to_cpu: bool = False, *, determinism_check: str = "default"
) -> nn.Module:
    """Sets the rule ``full`` on a module and returns it, like FairScale's function of this name.

    The module keeps its class, its attributes and its ``state_dict`` keys.

    Args:
        module: The module to wrap.
        offload_to_cpu: Whether what it keeps goes to pinned host memory; all modules wrapped so share its buffers.
        determinism_check: That of :func:`checkpoint`.

    Raises:
        ConfigError: The module is wrapped already, or ``determinism_check`` is not valid.
    """
    parse_determinism_check(determinism_check)
    module = unwrap(module)
    if policy_of(module) is not None:
        raise ConfigError(f"checkpoint_wrapper: this {type(module).__name__} is wrapped already · fix: wrap it once")
    placement = _IN_HOST_MEMORY if offload_to_cpu else None
    BlockForward(module, type(module).__name__, Full(), placement, determinism_check=determinism_check).install()
    return module


_IN_HOST_MEMORY = Placement(offload=Host())
# One for all wrapped modules, which cannot be distinguished: they share its buffers and are reloaded in order.


def is_recomputing() -> bool:
    """Whether the calling code runs in a recomputation, in this thread."""
    # All around it: each of them may be recomputed with this code, and then runs other code than in its forward.
    run = first = innermost()
    while run is not None:
        run.frame.asks_for_recomputation = True
        run = run.outer
    return first is not None and first.is_recomputation


_Site = tuple[str, tuple[weakref.ref[nn.Module], ...]]
"""The place of a function, and the modules that it runs: two functions may do different things with a module."""
_SITES: weakref.WeakKeyDictionary[nn.Module, dict[_Site, BlockContext]] = weakref.WeakKeyDictionary()
# What first calls have taught about modules: a cache, which changes no result. Its values refer to modules weakly, or
# its keys would never go.


def _context(function: Any, *arguments: Any) -> BlockContext:
    modules = _modules_of(function, arguments)
    name = attribute_of(function, "__qualname__")
    if not isinstance(name, str):  # an object that can be called
        name = type(modules[0] if modules else function).__name__
    place = _place_of(function)
    if not modules:
        return BlockContext(name, (), learns=False, sampler=_sampler_of(place))
    sites = _SITES.setdefault(modules[0], {})
    key = place, tuple(weakref.ref(module) for module in modules)  # not ids: those of the dead are given anew
    if key not in sites:
        # A dead reference equals itself alone: no call can find such a key again.
        for other in [other for other in sites if any(ref() is None for ref in other[1])]:
            del sites[other]
        sites[key] = BlockContext(name, modules)
    return sites[key]


@cache
def _sampler_of(place: str) -> CallSampler:
    """Returns the sampler of a function without modules, of which each call has a new block."""
    return CallSampler(place, is_of_block=False)


def _place_of(function: Any) -> str:
    """Returns file and line of the code that a call runs: closures that a loop makes are one function."""
    while isinstance(function, partial):
        function = function.func
    code = attribute_of(attribute_of(function, "__func__") or function, "__code__")
    return f"{code.co_filename}:{code.co_firstlineno}" if isinstance(code, CodeType) else type(function).__qualname__


# Note [Modules of a call]
# With a module `layer`, what `checkpoint` is called with, and how many functions and objects are opened on the way:
#
#     lambda x: layer(x)                      found: 1, the lambda
#     lambda x: layers[0](x)                  found with all others in the list: 1, as containers count as nothing
#     self.run, which calls self.layer        found with all attributes of `self`: 2, the method and the object
#     run, which calls help, which calls it   found: 2. Through one more function too, but not through two
#     run, x, cfg, with cfg.layer             found: an argument begins at 1, its attributes are at 2
#     run, x, cfg, with cfg.inner.layer       found; one object deeper it is not
#
# What is not found is recomputed all the same, but what its buffers count, such as BatchNorm, counts twice.

_DEPTH = 3
_MAX_ITEMS = 1024  # what is longer holds data, not layers
_MAX_VALUES = 2048  # what reaches more than this is a whole program
_LEAVES = (torch.Tensor, type, ModuleType, *ATOMS)
_CONTAINERS = (list, tuple, set, frozenset, deque, dict)


def _modules_of(function: Any, arguments: Iterable[Any]) -> list[nn.Module]:
    """Finds the modules that a call is likely to run.

    It follows up to two functions or objects from ``function`` and one from an argument, and all containers and
    dataclasses in between.
    """
    modules: dict[nn.Module, None] = {}
    depths: dict[int, int] = {}  # at which each value was opened
    # The function first: many values among the arguments must not hide its modules.
    for todo in [(function, 0)], [(value, 1) for value in arguments if not isinstance(value, _LEAVES)]:
        for value, depth in todo:  # which grows
            if isinstance(value, nn.Module):
                modules[unwrap(value)] = None
            elif depths.get(id(value), _DEPTH + 1) > depth and len(todo) < _MAX_VALUES:
                items, inner = _items(value), depth
                if items is None and depth < _DEPTH:
                    items, inner = _reached(value), depth + 1
                if items is not None:
                    depths[id(value)] = depth
                    todo += [(item, inner) for item in items if not isinstance(item, _LEAVES)]
    return list(modules)


def _items(value: Any) -> Iterable[Any] | None:
    """Returns the items of a container or the fields of a dataclass; ``None`` if it is neither."""
    if isinstance(value, _CONTAINERS):
        items = chain(value, value.values()) if isinstance(value, dict) else value
        return items if len(value) <= _MAX_ITEMS else ()
    return [attribute_of(value, field.name) for field in fields(value)] if is_dataclass(value) else None


def _reached(value: Any) -> Iterable[Any]:
    if isinstance(value, partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    if not isinstance(value, FunctionType):  # a built-in function, an op, an object
        call = type(value).__call__ if callable(value) else None
        return attribute_of(value, "__self__"), call, *_attributes(value).values()
    names, in_module = _names_in(value.__code__), value.__globals__
    cells = (cell.cell_contents for cell in value.__closure__ or () if cell != CellType())  # which has no value yet
    defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    named = [in_module[name] for name in names if name in in_module]
    # Functions of other modules are not followed: `F.linear` would lead to all of torch.
    helpers = (each for each in named if not isinstance(each, FunctionType) or each.__globals__ is in_module)
    return (
        *(each for owner in (*cells, *defaults, *helpers) for each in _used(owner, names)),
        *_attributes(value).values(),  # `__wrapped__`, by which decorators point to what they call
    )


@lru_cache(1024)
def _names_in(code: CodeType) -> tuple[str, ...]:
    inner = (_names_in(each) for each in code.co_consts if isinstance(each, CodeType))
    return (*code.co_names, *chain.from_iterable(inner))


def _used(value: Any, names: Iterable[str]) -> Iterable[Any]:
    """Returns the attributes in ``names`` of an object that a function refers to, and anything else as it is."""
    if callable(value) or isinstance(value, _CONTAINERS) or is_dataclass(value):
        return (value,)
    attributes = _attributes(value)
    return [attributes[name] for name in names if name in attributes]


def _attributes(value: Any) -> dict[str, Any]:
    return {} if isinstance(value, (type, ModuleType)) else attribute_of(value, "__dict__") or {}
