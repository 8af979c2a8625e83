"""The text of a Graph: its inputs, `print(graph)`, and the debug log of its calls."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphckpt.blocks.hooks import add_hook
from graphckpt.blocks.proxy import BlockTree
from graphckpt.errors import GraphError
from graphckpt.graph.capture import modules_of
from graphckpt.graph.config import GraphConfig
from graphckpt.tree import flatten_call, flatten_value
from graphckpt.undo import Undo, put_back, scope


@final
class InputCheck:
    """Shapes, dtypes, devices and values of the arguments of the first call, to compare later ones with."""

    def __init__(self, build: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        leaves, shape = flatten_call(args, kwargs)
        self.names = shape.names(build)
        """The paths of the arguments, as the user would write them."""
        self.described = [
            f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)} on {x.device}"
            if isinstance(x, torch.Tensor)
            else repr(x)
            for x in leaves
        ]

    def difference(self, build: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
        """Returns the difference from the first call, naming the argument by its path, or ``None``."""
        now = InputCheck(build, args, kwargs)
        if now.names != self.names:
            return f"the arguments were ({', '.join(self.names)}) and are ({', '.join(now.names)})"
        for name, was, described in zip(self.names, self.described, now.described, strict=True):
            if was != described:
                return f"input `{name}` was {was} and is {described}"
        return None


def graph_text(
    kind: str,
    name: str,
    config: GraphConfig,
    roots: Mapping[str, nn.Module],
    tree: BlockTree,
    inputs: InputCheck | None,
) -> str:
    """Returns a line for the Graph, each input of its first call, and each block with its policy.

    Consecutive children of one kind and policy share a line, as in the text of an ``nn.ModuleList``.
    """
    lines = [f"{name}: {kind}({config.describe()})"]
    if inputs is not None:
        pairs = zip(inputs.names, inputs.described, strict=True)
        lines += [f"  input {path}: {described}" for path, described in pairs]
    lines += _children_lines(roots.items(), tree)
    return "\n".join(lines)


def _children_lines(children: Iterable[tuple[str, nn.Module]], tree: BlockTree) -> list[str]:
    def head(module: nn.Module) -> str:
        kind, settings = type(module).__name__, module.extra_repr()
        config = tree.configs.get(module)
        policy = f" · {config.describe()}" if config is not None and config.fields() else ""
        return (f"{kind}({settings})" if settings and "\n" not in settings else kind) + policy

    entries = [(key, [head(child), *_children_lines(child.named_children(), tree)]) for key, child in children]
    # Three equal layers are "0-2: 3 x Linear(...) · activation_checkpointing=True", as their keys are numbers; children
    # with names have a line each.
    result = []
    for (_, (first, *nested)), alike in groupby(
        entries, lambda entry: ("" if entry[0].isdigit() else entry[0], entry[1])
    ):
        keys = [key for key, _ in alike]
        name = f"{keys[0]}: " if len(keys) == 1 else f"{keys[0]}-{keys[-1]}: {len(keys)} x "
        result += [f"  {name}{first}", *(f"  {line}" for line in nested)]
    return result


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    trains = ", requires_grad=True" if value.requires_grad else ""
    return f"tensor(..., size={tuple(value.shape)}, dtype={value.dtype}{trains})"


@final
class DebugLog:
    def __init__(self) -> None:
        self.level = -1
        self._stack_depth = 2
        self._only_user = True
        self._with_stack = False

    def configure(self, level: Any, ranks: Any, stack_depth: int, only_user: bool, with_stack: bool) -> None:
        if isinstance(level, bool) or not isinstance(level, int) or not -1 <= level <= 3:
            raise GraphError(f"debug: level {level!r} is not within -1 and 3 · fix: use one of -1, 0, 1, 2, 3")
        if ranks is not None and not isinstance(ranks, (int, list)):
            raise GraphError(f"debug: ranks {ranks!r} must be an int or a list of ints · fix: use 0, [0, 1] or -1")
        chosen = [0] if ranks is None else [ranks] if isinstance(ranks, int) else ranks
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self.level = level if rank in chosen or -1 in chosen else -1
        self._stack_depth = stack_depth
        self._only_user = only_user
        self._with_stack = with_stack

    @scope
    def logging(self, undo: Undo, name: str, roots: Mapping[str, nn.Module]) -> Iterator[None]:
        begin = time.perf_counter()
        self._say(f"(GRAPH:{name}) start running the step.")
        ops: AbstractContextManager[Any] = _OpLog(self) if self.level >= 2 else nullcontext()
        try:
            if self.level >= 1:
                for path, module in modules_of(roots.items()):
                    add_hook(undo, module, partial(self._block, path))
            with ops:
                yield
        except BaseException as error:
            self._say(f"[ERROR](GRAPH:{name}) run got error: {type(error)} {error}")
            raise
        put_back(undo)
        self._say(f"(GRAPH:{name}) running the step Done! Cost time: {time.perf_counter() - begin:.2f}s.")

    def op(self, func: Any, args: Any, output: Any) -> None:
        inputs = ", ".join(_describe(x) for x in args if isinstance(x, torch.Tensor))
        outputs = ", ".join(_describe(x) for x in flatten_value(output)[0])
        self._say(f"    (OPERATOR: {func}({inputs}) -> ({outputs}))")
        if self.level >= 3 or self._with_stack:
            library_folders = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
            stack = traceback.extract_stack()[:-2]  # without this method and its caller
            lines = [f for f in stack if not self._only_user or not f.filename.startswith(library_folders)]
            for line in lines[-self._stack_depth :]:
                self._say(f"      {Path(line.filename).name}:{line.lineno} {line.line}")

    def _block(self, path: str, _: nn.Module, args: Any, output: Any) -> None:
        for tag, values in (("INPUT", args), ("OUTPUT", output)):
            for number, leaf in enumerate(flatten_value(values)[0]):
                self._say(f"  ({tag}:_{path}_{tag.lower()}.{number}:{_describe(leaf)})")

    def _say(self, line: str) -> None:
        sys.stdout.write(line + "\n")


@final
class _OpLog(TorchDispatchMode):
    def __init__(self, log: DebugLog) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self._log.op(func, args, output)
        return output
