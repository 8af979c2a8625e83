"""The few private names of PyTorch's compiler and dispatcher that graphckpt needs, each with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import getitem
from typing import Any, TypeVar, final

import torch
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard
from torch._C._autograd import _enable_record_function
from torch._C._dynamo import eval_frame
from torch.fx import traceback
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from graphckpt.undo import Ending, Undo, scope

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


annotate, get_current_meta = traceback.annotate, traceback.get_current_meta  # documented as not backward compatible
_PYTORCHS = ("aten", "prims", "prim", "inductor", "_inductor_test", "c10d_functional", "_c10d_functional", "rngprims")
"""The modules of PyTorch's ops, whose tags say whether they draw numbers."""
_NEVER = 1e9  # how far from backward the compiler puts a node that backward has no use for
_LEAST = 1e-6  # at 0 the compiler saves the inputs and asks for nothing else


def has_compiled_call(module: torch.nn.Module) -> bool:
    """Whether ``module.compile()`` or ``torch.compile(module)`` has compiled its whole call; no mark is public."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def never_compiled(function: _Hook) -> _Hook:
    """Marks a hook, which the compiler must run as it is: ``torch.compiler.disable`` imports it, and costs a call."""
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


def constant_in_graphs(method: _Hook) -> _Hook:
    """Has the compiler call a method while it traces, and take what it returns for a constant.

    ``torch.compiler.assume_constant_result`` does the same, and imports the compiler.
    """
    method._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return method


@constant_in_graphs
def is_exporting() -> bool:
    """``torch.compiler.is_exporting()``, for which the compiler of torch 2.11 takes ``True`` in all that it traces."""
    return torch.compiler._is_exporting_flag


class DispatchMode(TorchDispatchMode):
    """A dispatch mode whose ``__torch_dispatch__`` is :func:`never_compiled`, and which does not see compiled ops.

    PyTorch wraps it for every mode in ``torch.compiler.disable``, which costs 2 us an op.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def compiler_of(backend: Any, mode: str | None, options: Any, dynamic: bool | None) -> Callable[[Any, Any], Any]:
    """Returns what ``torch.compile`` makes of these arguments, to be called by a backend; equal ones compare equal."""
    if backend == "inductor":
        return torch._TorchCompileInductorWrapper(mode, options, dynamic)
    return torch._TorchCompileWrapper(backend, mode, options, dynamic)


# Note [What the compiler must not recompute]
# The compiler's option `activation_memory_budget` lets it recompute any op in backward: random ones,
# with other random numbers (pytorch#190758), and those that read what the forward has overwritten by its end, such as a
# buffer that is updated. Gradients are wrong then, without a word; seen in torch 2.13. What the graph marks as to be
# saved it does save, at any share above 0. So such ops are marked, just before it chooses; of Inductor's random ops
# these are the seeds alone. Custom ops are marked too, as what they read is unknown. An op of several results is marked
# as a whole, and at times chosen as a whole, which no code can save: its results stand for it then. A graph that the
# compiler's cache has from elsewhere may have been compiled without marks: that cache is left out.


@scope
def saving(undo: Undo, share: float) -> Iterator[None]:
    """Makes compiled code save a share of the bytes that the compiler saves by default, and the same random numbers.

    The knob is one of the process, and private; the public way, from torch 2.13 on, is a prototype.
    """
    from torch._functorch import config, partitioners  # noqa: PLC0415 - they take a second

    choose = partitioners.choose_saved_values_set

    def choose_with_marks(graph: Any, info: Any, memory_budget: float = 1.0) -> Any:
        for node in _not_repeatable(graph):
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)  # a checkpoint of the user's draws them again
        saved = choose(graph, info, memory_budget=memory_budget)
        return list(dict.fromkeys(each for node in saved for each in _results(node)))

    settings = {"activation_memory_budget": max(share, _LEAST), "enable_autograd_cache": False}
    undo += [(setattr, (config, name, getattr(config, name))) for name in settings]
    undo.append((setattr, (partitioners, "choose_saved_values_set", choose)))
    partitioners.choose_saved_values_set = choose_with_marks  # type: ignore[assignment]
    for name, value in settings.items():
        setattr(config, name, value)
    yield


def _results(node: Any) -> list[Any]:
    """Returns a node that has one result, or else its results."""
    if not isinstance(node.meta.get("val"), (tuple, list)):
        return [node]
    return [user for user in node.users if user.target is getitem and user.dist_from_bw < _NEVER]


def _not_repeatable(graph: Any) -> list[Any]:
    """Returns the nodes that would do something else the second time."""
    changed = {
        node.args[0]
        for node in graph.nodes
        if node.op == "call_function"
        and node.target is torch.ops.aten.copy_.default
        and node.args[0].op == "placeholder"
    }
    nodes = []
    for node in graph.nodes:  # in the order in which they run
        if node.op != "call_function":
            continue
        if changed.intersection(node.all_input_nodes):
            if getattr(node.target, "is_view", False):
                changed.add(node)
            else:
                nodes.append(node)
        elif _is_random(node):
            nodes.append(node)
    return nodes


def _is_random(node: Any) -> bool:
    """Whether a call draws numbers that nothing can draw again, as far as can be seen."""
    op = node.target
    if any(map(_draws, (*node.args, *node.kwargs.values()))):
        return True  # a custom op that modifies its arguments is an argument of a call that does not
    if not _draws(op):
        return False
    names = [argument.name for argument in op._schema.arguments]
    if "dropout_p" not in names:
        return True
    at = names.index("dropout_p")  # of attention, which may draw nothing
    return bool((node.args[at] if at < len(node.args) else node.kwargs.get("dropout_p", 1.0)) != 0.0)


def _draws(value: Any) -> bool:
    """Whether an op draws numbers, or one of a graph does."""
    if isinstance(value, torch._ops.OpOverload):
        if value._opname.startswith("inductor_"):
            return value._opname.startswith("inductor_seed")  # numbers that come of a seed, come of it again
        return value.namespace not in _PYTORCHS or torch.Tag.nondeterministic_seeded in value.tags
    if getattr(value, "op", None) == "get_attr":
        value = value.graph.owning_module and getattr(value.graph.owning_module, str(value.target), None)
    if isinstance(value, torch.fx.GraphModule):
        return any(node.op == "call_function" and _is_random(node) for node in value.graph.nodes)
    return False


_OBSERVERS = DispatchKeySet(DispatchKey.Python)
for _key in DispatchKey.__members__:
    if _key.startswith(("Autocast", "Autograd")) or _key in ("PythonTLSSnapshot", "ADInplaceOrView"):
        _OBSERVERS = _OBSERVERS.add(DispatchKey.__members__[_key])


@final
class unobserved:  # noqa: N801 - a function for those who use it; as a generator it would take twice the time
    """Hides ops from all that a program can put around them: modes, subclasses, autocast, autograd and profilers.

    It cannot be nested. What sets aside dispatch modes alone takes more time than most ops.
    """

    __slots__ = ("_functions", "_keys")

    def __init__(self) -> None:
        self._keys = _ExcludeDispatchKeyGuard(_OBSERVERS)
        self._functions = torch._C.DisableTorchFunction()

    def __enter__(self) -> None:
        _enable_record_function(False)
        self._keys.__enter__()
        self._functions.__enter__()

    def _exit(self, *_: object) -> None:  # leaves parts that have not begun, or have ended, as they are
        self._functions.__exit__(None, None, None)
        self._keys.__exit__(None, None, None)
        _enable_record_function(True)

    __exit__ = Ending(_exit, _exit)


def compiler_callback() -> Callable[..., Any]:
    """Returns the function that each call of a compiled function asks whether to compile."""
    from torch._dynamo import eval_frame  # noqa: PLC0415 - takes seconds

    return eval_frame._callback_from_stance
