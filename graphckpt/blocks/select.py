"""Finds the modules that a selector matches: by name, by class, or the module itself."""

from __future__ import annotations

import fnmatch
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from inspect import getattr_static
from typing import Any, TypeAlias

from torch import nn
from torch.nn.parameter import is_lazy

from graphckpt.errors import ConfigError, did_you_mean, shown

Selector: TypeAlias = str | re.Pattern[str] | type[nn.Module] | nn.Module
"""A name or name pattern as for :mod:`fnmatch` (``"transformer.h.*"``), a regular expression
(``re.compile(r"h\\.[0-3]")`` or ``"re:h\\.[0-3]"``), a class or its name (``"GPT2Block"``), or a module."""

# Note [Which lists are stacks of layers]
#
#     list                                                     layers
#     three blocks of one class                                these
#     convolution, norm, ReLU, convolution, norm, ReLU         none: no class is most of them, and none has children
#     blocks of class A, B, A, B                               all four: each class is there twice, and has children
#     blocks of three classes                                  none
#     three stages of two blocks, of 8, 16 and 32 channels     the six blocks: the stages differ in size
#     three groups of two blocks, all of one size              the three groups
#     linear, a sequence of four blocks, linear                the four blocks, which have most of the parameters
#     ModuleDict with the keys "0", "1"                        its items; with "a", "b" none
#     items without a forward, of a norm and a large block     the large blocks

_SMALLEST = 10  # of an item without a forward, modules with a smaller share of its parameters, as norms, are no layers


def select(model: nn.Module, selector: Selector) -> list[tuple[str, nn.Module]]:
    """Returns the ``(name, module)`` pairs of ``model`` that ``selector`` matches, in the model's order.

    Modules inside a matching module are not matched again, so that ``"layers.*"`` selects the layers and not everything
    in them. ``""`` is the model itself; no other string selects it. A string that matches no name selects the modules
    of the class of that name.

    Raises:
        ConfigError: The selector has another type, is not a valid expression, or matches nothing.
    """
    # With duplicates: a shared module has several names, and each of them selects it.
    named = list(model.named_modules(remove_duplicate=False))
    if isinstance(selector, nn.Module):
        matches = [(name, module) for name, module in named if module is selector][:1]
    elif isinstance(selector, type):
        matches = [(name, module) for name, module in named if isinstance(module, selector)]
    elif isinstance(selector, (str, re.Pattern)):
        # First as it is: the key of a ModuleDict may have the characters of a pattern, such as "block[0]".
        matches = [(name, module) for name, module in named if name == selector]
        pattern = _pattern(selector)
        matches = matches or [(name, module) for name, module in named if name and pattern.fullmatch(name)]
        if not matches and isinstance(selector, str):
            matches = [(name, module) for name, module in named if name and selector in _class_names(module)]
    else:
        raise ConfigError(
            f"expected a name pattern, a regular expression, a class or a module, got {shown(selector)} · "
            "fix: a name of model.named_modules(), such as 'layers.0', or 'layers.*'"
        )
    if not matches:
        raise ConfigError(_matches_nothing(model, selector, named))
    inner = {id(child) for _, module in matches for child in module.modules() if child is not module}
    return [(name, module) for name, module in matches if id(module) not in inner]


def _class_names(module: nn.Module) -> Iterator[str]:
    for kind in type(module).__mro__:
        yield kind.__name__
        yield f"{kind.__module__}.{kind.__name__}"


def _matches_nothing(model: nn.Module, selector: Selector, named: Sequence[tuple[str, nn.Module]]) -> str:
    owner = type(model).__name__
    if isinstance(selector, nn.Module):
        return f"a {type(selector).__name__} is not a module of {owner} · fix: select a module of the model"
    classes = {type(module).__name__ for _, module in named}
    word = describe(selector)
    patterns = dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name, _ in named)
    example = next((name for name in patterns if name.endswith("*")), None) or next(filter(None, patterns), owner)
    if isinstance(selector, type):
        described, names, hint = f"class {word}", classes, did_you_mean(word, classes)
    else:
        if word in dict(model.named_parameters()):
            module = word.rpartition(".")[0]
            return f"{word!r} is a parameter of {owner}, expected a module · fix: use {module!r}"
        described, names = repr(word), set(patterns)
        names |= {name for name, _ in named if "*" not in word}
        # names of modules are in lower case, those of classes are not
        kinds = (names, classes) if word.islower() else (classes, names)
        hint = did_you_mean(word, kinds[0]) or did_you_mean(word, kinds[1])
        if any(fnmatch.fnmatchcase(name, f"*.{word}") for name, _ in named):
            hint = f" · did you mean '*.{word}'?"
    listed = sorted(filter(None, names))
    hint = hint or f" · the model has {', '.join(map(repr, listed[:8]))}{', ...' if len(listed) > 8 else ''}"
    fix = f"use a name or class of model.named_modules(), such as {example!r}"
    return f"{described} matches no module of {owner}{hint} · fix: {fix}"


def _pattern(selector: str | re.Pattern[str]) -> re.Pattern[str]:
    if isinstance(selector, re.Pattern):
        return selector
    if not selector.startswith("re:"):
        return re.compile(fnmatch.translate(selector))
    try:
        return re.compile(selector[3:])
    except re.error as error:
        fix = "fix: correct it, such as 're:layers[.][0-3]'"
        raise ConfigError(f"{selector!r} is not a valid regular expression: {error} · {fix}") from None


def describe(selector: Any) -> str:
    if isinstance(selector, nn.Module):
        return type(selector).__name__
    return selector.__name__ if isinstance(selector, type) else str(getattr(selector, "pattern", selector))


def has_forward(module: nn.Module) -> bool:
    """Whether a call of the module can run its forward: a policy acts there, and nowhere else.

    An ``nn.ModuleList`` or ``nn.ModuleDict`` has none, unless a subclass defines one.
    """
    # Not getattr: the class attribute of a scripted module cannot be read.
    return "forward" in vars(module) or getattr_static(type(module), "forward", None) is not nn.Module.forward


def layers(model: nn.Module) -> list[str]:
    """Returns the names of the layers of any model: those that Transformers recomputes, or the items of its stacks.

    A stack is a list, sequence or ``ModuleDict`` with numbers as keys of two modules or more, most of which are of one
    class and have parameters, or of classes that occur repeatedly and have children, as alternating layers have. Of
    nested stacks the outer one counts if half of its items are of one size, and else the inner ones: it is one of
    stages. Of nested layers of Transformers and Diffusers the inner ones count if they have most of the parameters of
    the outer one. An item without a forward, which no policy can recompute, is replaced by the modules in it that have
    one and more than a tenth of its parameters. No layer is in another one, and each has a forward.

    >>> stack = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    >>> layers(nn.Sequential(nn.Linear(2, 2), stack, nn.Linear(2, 2)))
    ['1.0', '1.1', '1.2']
    """
    return _callable(model, _flagged(model) or _stacked("", model)) or marked_layers(model)


def _callable(model: nn.Module, names: list[str]) -> list[str]:
    """Returns the layers, or what is in those without a forward; each module once, by its first name."""
    modules: dict[nn.Module, str] = {}
    for name in names:
        for inner, module in _with_forward(name, model.get_submodule(name)):
            modules.setdefault(module, inner)
    return list(modules.values())


def _with_forward(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if has_forward(module):
        yield name, module
        return
    for key, child in module.named_children():
        if _SMALLEST * _size(child) > _size(module):
            yield from _with_forward(f"{name}.{key}", child)


def _stacked(prefix: str, module: nn.Module) -> list[str]:
    children = [(f"{prefix}.{key}" if prefix else key, child) for key, child in module.named_children()]
    items = [(name, child) for name, child in children if _size(child)]
    kinds = Counter(type(child) for _, child in items)
    is_list = _is_stack(module) and len(items) > 1
    if is_list and 2 * max(kinds.values()) <= len(items):
        # Those without children, as the convolutions and norms of a sequence, alternate within a layer.
        larger = [(name, child) for name, child in items if any(child.children())]
        is_list = 2 * sum(kinds[type(child)] > 1 for _, child in larger) > len(items)
        items = larger
    if is_list:
        inner = [_stacked(name, child) for name, child in children]
        deep = [names for names in inner if names]
        start = f"{prefix}." if prefix else ""
        if len(deep) == 1 and 2 * _size_of(module, [name.removeprefix(start) for name in deep[0]]) > _size(module):
            return deep[0]  # a stack between a first and a last layer
        sizes = [_size(child) for _, child in items]
        if not all(inner) or 2 * max(map(sizes.count, sizes)) >= len(sizes):
            return [name for name, _ in items]
        return [name for names in inner for name in names]
    return [name for path, child in children for name in _stacked(path, child)]


def _is_stack(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleDict):  # as torchtitan has its layers, so that a pipeline stage can lack some
        return all(key.isdecimal() for key in module)
    return isinstance(module, (nn.ModuleList, nn.Sequential))


def marked_layers(model: nn.Module) -> list[str]:
    """Returns the layers that Transformers recomputes, in the ways in which its models have marked them over time."""
    return _callable(model, _marked(model))


def _marked(model: nn.Module) -> list[str]:
    if names := _flagged(model):
        return names
    pretrained, _ = _classes_of_transformers()
    named = list(model.named_modules())
    classes = set(getattr(model, "_no_split_modules", None) or ())
    if names := [name for name, module in named if name and type(module).__name__ in classes]:
        return _without_nested(model, names)
    lists = [name for name, module in named if isinstance(module, nn.ModuleList) and _size(module)]
    if not isinstance(model, pretrained) or not lists:
        return []
    largest = max(lists, key=lambda name: _size(model.get_submodule(name)))  # of equal ones the outermost
    return [f"{largest}.{number}" for number, _ in model.get_submodule(largest).named_children()]


def _flagged(model: nn.Module) -> list[str]:
    _, layer = _classes_of_transformers()
    named = list(model.named_modules())
    if names := [name for name, module in named if isinstance(module, layer)]:
        return _without_nested(model, names)
    names = []
    for owner, module in named:  # before 2025: a flag on the module that loops over a list of layers
        if hasattr(module, "gradient_checkpointing"):
            for child, layers_list in module.named_children():
                if isinstance(layers_list, nn.ModuleList):  # some of whose items may be None
                    names += [".".join(filter(None, (owner, child, n))) for n, _ in layers_list.named_children()]
    return _without_nested(model, names)


def _without_nested(model: nn.Module, layers: list[str]) -> list[str]:
    """Leaves one level of nested layers: the inner ones if they make up most of the outer one, and else that."""
    dropped: set[str] = set()
    for name in layers:
        inner = [other for other in layers if other.startswith(f"{name}.")]
        inner_size = _size_of(model, inner)
        if inner and name not in dropped:
            dropped |= {name} if 2 * inner_size > _size(model.get_submodule(name)) else set(inner)
    return [name for name in layers if name not in dropped]


def _size_of(module: nn.Module, names: list[str]) -> int:
    return sum(_size(module.get_submodule(name)) for name in names)


def _size(module: nn.Module) -> int:
    return sum(1 if is_lazy(parameter) else parameter.numel() for parameter in module.parameters())


def _classes_of_transformers() -> tuple[Any, Any]:
    """Returns its base class of models and of layers; no model is of either before they are imported."""
    if "transformers" not in sys.modules:
        return (), ()
    from transformers import PreTrainedModel  # noqa: PLC0415 - takes a second
    from transformers.modeling_layers import GradientCheckpointingLayer  # noqa: PLC0415

    return PreTrainedModel, GradientCheckpointingLayer
