"""The few private names of PyTorch's compiler that graphckpt needs, each beside the reason."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch.utils.checkpoint import CheckpointPolicy

from graphckpt._compat import torch_version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    _Hook = TypeVar("_Hook", bound=Callable[..., Any])

__all__ = ["compiler_of", "has_compiled_call", "never_compiled", "saving"]

_LEAST = 1e-6  # at 0 the compiler saves the inputs and asks for nothing else


def has_compiled_call(module: torch.nn.Module) -> bool:
    """Whether ``module.compile()`` or ``torch.compile(module)`` has compiled its whole call; no mark is public."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def never_compiled(function: _Hook) -> _Hook:
    """Marks a hook, which the compiler must run as it is: ``torch.compiler.disable`` imports it, and costs a call."""
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


def compiler_of(backend: Any, mode: str | None, options: Any, dynamic: bool | None) -> Callable[[Any, Any], Any]:
    """Returns what ``torch.compile`` makes of these arguments, to be called by a backend; equal ones compare equal."""
    if backend == "inductor":
        return torch._TorchCompileInductorWrapper(mode, options, dynamic)
    return torch._TorchCompileWrapper(backend, mode, options, dynamic)


# Note [Dropout in code that is compiled to save less]
# The compiler's knob for what it saves, `activation_memory_budget`, lets it run any op again in backward, random ones
# as well, with other random numbers: gradients are wrong, without a word (pytorch#190758, seen up to torch 2.13). What
# the graph marks as to be saved it does save, at any share above 0. So what draws numbers is marked, just before it
# chooses; of Inductor's own ops these are the seeds alone. Before torch 2.13 we have not seen that it heeds the mark:
# there a graph with random ops saves what it would. A graph that its cache knows from elsewhere may have been compiled
# without marks: that cache is left out.


@contextmanager
def saving(share: float) -> Iterator[None]:
    """Has what is compiled within save a share of what the compiler would by itself, and the same random numbers.

    The knob is one of the process, and private; the public way, from torch 2.13 on, is a prototype.
    """
    from torch._functorch import config, partitioners  # noqa: PLC0415 - they take a second

    choose = partitioners.choose_saved_values_set

    def choose_beside_random(graph: Any, info: Any, memory_budget: float = 1.0) -> Any:
        random = [node for node in graph.nodes if _is_random(node)] if memory_budget < 1.0 else []
        for node in random:
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)  # a checkpoint of the user's draws them again
        heeds = not random or torch_version() >= (2, 13)
        return choose(graph, info, memory_budget=memory_budget if heeds else 1.0)

    partitioners.choose_saved_values_set = choose_beside_random  # type: ignore[assignment]
    try:
        with config.patch(activation_memory_budget=max(share, _LEAST), enable_autograd_cache=False):
            yield
    finally:
        partitioners.choose_saved_values_set = choose


def _is_random(node: Any) -> bool:
    """Whether a node draws numbers that nothing can draw again."""
    if node.op != "call_function":
        return False
    op = node.target
    if getattr(op, "__name__", "").startswith("inductor_"):
        return str(op.__name__).startswith("inductor_seed")  # numbers that come of a seed, come of it again
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return False
    names = [argument.name for argument in op._schema.arguments]
    at = names.index("dropout_p") if "dropout_p" in names else len(node.args)  # of attention, which may draw nothing
    return bool((node.args[at] if at < len(node.args) else node.kwargs.get("dropout_p", 1.0)) != 0.0)
