"""The text of a Graph: `print(graph)` in OneFlow's format, and the debug log of its calls."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphckpt.blocks.proxy import BlockTree
from graphckpt.errors import GraphError
from graphckpt.graph.config import GraphConfig
from graphckpt.graph.inputs import InputCheck
from graphckpt.tree import flatten_value


def graph_text(
    kind: str,
    name: str,
    config: GraphConfig,
    roots: Mapping[str, nn.Module],
    tree: BlockTree,
    inputs: InputCheck | None,
) -> str:
    """Returns the nested text of a graph: config, inputs after a first call, modules, parameters, buffers, policies."""
    lines = [f"(GRAPH:{name}:{kind}): (", f"  (CONFIG:config:{config!r})"]
    if inputs is not None:
        pairs = zip(inputs.names, inputs.described, strict=True)
        lines += [f"  (INPUT:_{name}_input.{path}:{what})" for path, what in pairs]
    for key, module in roots.items():
        lines += _module_lines(key, key, module, tree, "  ")
    return "\n".join([*lines, ")"])


def _module_lines(path: str, key: str, module: nn.Module, tree: BlockTree, indent: str) -> list[str]:
    inner: list[str] = []
    for tag, named in (("PARAMETER", module.named_parameters), ("BUFFER", module.named_buffers)):
        inner += [f"{indent}  ({tag}:{path}.{n}:{_describe(t)}): ()" for n, t in named(recurse=False)]
    for name, child in module.named_children():
        inner += _module_lines(f"{path}.{name}", name, child, tree, indent + "  ")
    config = tree.configs.get(module)
    if config is not None and "=" in repr(config):
        inner.append(f"{indent}  (GraphModule:{path}({repr(config).partition('(')[2]}): ()")
    settings = module.extra_repr()
    head = f"{indent}(MODULE:{path}:{type(module).__name__}({settings})): ("
    return [head, *inner, f"{indent})"] if inner else [head + ")"]


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    trains = ", requires_grad=True" if value.requires_grad else ""
    return f"tensor(..., size={tuple(value.shape)}, dtype={value.dtype}{trains})"


@final
class DebugLog:
    """Prints what a call does, down to the level that was asked for."""

    def __init__(self) -> None:
        self.level = -1
        self._stack_depth = 2
        self._only_user = True
        self._with_stack = False

    def configure(self, level: Any, ranks: Any, stack_depth: int, only_user: bool, with_stack: bool) -> None:
        """Sets the level, -1 to 3, and the ranks on which it holds (0 by default, -1 for all)."""
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

    @contextmanager
    def around(self, name: str, roots: Mapping[str, nn.Module]) -> Iterator[None]:
        """Prints the stages of one call and, by level, the blocks and ops in it."""
        begin = time.perf_counter()
        self._say(f"(GRAPH:{name}) start running the step.")
        hooks: list[Any] = []
        ops: AbstractContextManager[Any] = _OpLog(self) if self.level >= 2 else nullcontext()
        try:
            if self.level >= 1:
                for key, root in roots.items():
                    hooks += self._log_blocks(key, root)
            with ops:
                yield
        except BaseException as error:
            self._say(f"[ERROR](GRAPH:{name}) run got error: {type(error)} {error}")
            raise
        finally:
            for hook in hooks:
                hook.remove()
        self._say(f"(GRAPH:{name}) running the step Done! Cost time: {time.perf_counter() - begin:.2f}s.")

    def op(self, func: Any, args: Any, output: Any) -> None:
        """Prints one op, with the user's lines that led to it if these were asked for."""
        inputs = ", ".join(_describe(x) for x in args if isinstance(x, torch.Tensor))
        outputs = ", ".join(_describe(x) for x in flatten_value(output)[0])
        self._say(f"    (OPERATOR: {func}({inputs}) -> ({outputs}))")
        if self.level >= 3 or self._with_stack:
            own = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
            stack = traceback.extract_stack()[:-2]  # without this method and its caller
            lines = [f for f in stack if not self._only_user or not f.filename.startswith(own)]
            for line in lines[-self._stack_depth :]:
                self._say(f"      {Path(line.filename).name}:{line.lineno} {line.line}")

    def _log_blocks(self, key: str, root: nn.Module) -> list[Any]:
        def hook(module: nn.Module, args: Any, output: Any, path: str) -> None:
            del module
            for tag, values in (("INPUT", args), ("OUTPUT", output)):
                for number, leaf in enumerate(flatten_value(values)[0]):
                    self._say(f"  ({tag}:_{path}_{tag.lower()}.{number}:{_describe(leaf)})")

        return [
            module.register_forward_hook(lambda m, a, o, p=f"{key}.{path}" if path else key: hook(m, a, o, p))
            for path, module in root.named_modules()
        ]

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
