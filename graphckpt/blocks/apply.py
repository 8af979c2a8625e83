"""Sets policies on the modules of a model, in any training loop, and removes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, Self, TypeAlias, final
from weakref import WeakKeyDictionary, WeakMethod

from torch import nn

from graphckpt.blocks.config import FIELDS, INHERITED, OTHER_NAMES, BlockConfig, fields_of
from graphckpt.blocks.explain import StepRecorder
from graphckpt.blocks.forward import BlockForward, ForwardWrapper, policy_of
from graphckpt.blocks.proxy import unwrap
from graphckpt.blocks.resolve import ResolvedPolicies, resolve_policies
from graphckpt.blocks.select import Selector, describe, has_forward, layers, select
from graphckpt.engine.sampling import parse_determinism_check
from graphckpt.engine.values import report_differences
from graphckpt.errors import ConfigError, check_keywords, shown, without_repeats
from graphckpt.extras import LazyPackage
from graphckpt.ledger.groups import group_names
from graphckpt.rules.base import Rule, parse_rule
from graphckpt.undo import Ending
from graphckpt.yaml_text import compose

if TYPE_CHECKING:
    import yaml

    from graphckpt.ledger.explanation import Explanation
else:
    yaml = LazyPackage("yaml", "plan")

Policies: TypeAlias = Mapping[Selector, Any] | Iterable[Selector] | Selector | Rule | bool | str | PathLike[str]
"""Policies, in all forms in which :func:`apply` takes them."""

# Note [From policies to wrappers]
# Of {"layers.*": True, "layers.1": {"offload": "disk"}, "layers.0.1": False} with exclude=["layers.2"]:
#
#     selectors, in this order     the config of each module                 its wrapper, by `resolve_policies`
#     layers.*: 0, 1, 2            layers.0    True                          Full
#     layers.1                     layers.0.1  False                         Keep, excluded from layers.0
#     layers.0.1                   layers.1    True, with offload to disk    Full, with a store on disk
#     excluded: layers.2           layers.2    all fields False              none: as without a policy
#
# A later selector adds to the fields of an earlier one, as here on layers.1. Up to here nothing has touched the model:
# faults are collected, and raised together. Then `Handle` installs the wrappers.

_FILES = (".yaml", ".yml", ".json")
_KEEP_ALL = {"activation_checkpointing": False, "offload": False, "partition": False, "contiguous": False}
_SHOWN = 40  # characters of policies in advice: with the call around them they take a line


@final
class Handle:
    """Policies that are active on a model, until :meth:`remove` or the end of the ``with`` block."""

    def __init__(self, model: nn.Module, policies: ResolvedPolicies) -> None:
        self._wrappers = policies.wrappers
        self._model_class = type(model).__name__
        self._watcher = StepRecorder(type(model).__name__, [("", model)], policies)
        for wrapper in self._wrappers:
            wrapper.install()
        # Last: a policy on the model itself would not call a watcher below it.
        self._watcher.watch_next_forward()

    def explain(self, plot: str | None = None, *, show: bool = True) -> Explanation:
        """Prints what each block keeps, and returns it. See :meth:`measure` for peaks, times and the plot.

        Without :meth:`measure`, the rows are those of the first forward and backward after ``apply``.
        It prints the table unless ``show`` is false. The object that it returns prints as the same table, and a
        notebook shows it as one: there, ``explain(show=False)`` as the last line of a cell suffices.

        Args:
            plot: File for a plot of the live bytes over the step, ``.png``, ``.svg`` or ``.html``.
            show: Whether to print.

        Raises:
            GraphError: No step has run yet.
        """
        return self._watcher.explain(plot, show=show)

    def measure(self) -> AbstractContextManager[None]:
        """Measures the step that runs in the ``with`` block, op by op; :meth:`explain` then reports on that step."""
        return self._watcher.measure()

    def remove(self) -> None:
        """Removes the policies and restores the model. A second call does nothing."""
        report_differences()
        self._watcher.close()
        self._watcher.is_removed = True
        for wrapper in self._wrappers:
            wrapper.uninstall()
            if wrapper.placement is not None:
                wrapper.placement.store.close()

    def __repr__(self) -> str:
        stores = [w.context.store.label for w in self._wrappers]
        policies = [
            w.rule.describe() + ("" if store == "device" else f" + {store}")
            for w, store in zip(self._wrappers, stores, strict=True)
        ]
        blocks_of: dict[str, list[str]] = {}
        for name, members in group_names([w.name or self._model_class for w in self._wrappers], policies):
            count = f" ({len(members)}x)" if len(members) > 1 else ""
            blocks_of.setdefault(policies[members[0]], []).append(name + count)
        parts = [f"{rule}: {', '.join(names)}" for rule, names in blocks_of.items()]
        return f"Handle({'; '.join([self._model_class, *parts])})"

    def __enter__(self) -> Self:
        return self

    def _exit(self, *_: object) -> None:
        self.remove()

    __exit__ = Ending(_exit, _exit)


def apply(  # noqa: D417 - `unknown` is for arguments that it does not have
    model: nn.Module,
    policies: Policies,
    *,
    exclude: Iterable[Selector] | Selector = (),
    determinism_check: str = "default",
    replace: bool = False,
    **unknown: Never,
) -> Handle:
    """Sets policies on blocks of ``model``.

    Args:
        model: Any module; it keeps its type, its hooks and its ``state_dict`` keys.
        policies: A mapping from a selector (a name pattern, a regular expression, a class or its name, a module) to the
            fields of a :class:`~graphckpt.BlockConfig`, or to a value of ``activation_checkpointing`` alone; a later
            selector overrides an earlier one, field by field. A value of ``activation_checkpointing``, such as
            ``True``, is set on the model's layers, which ``repr()`` of the handle lists. A list of selectors, a class
            or a module is ``True`` for each of them. A path that ends in ``.yaml``, ``.yml`` or ``.json`` names a
            file that contains a mapping, or a plan that :meth:`Plan.save` has written.
        exclude: Selectors of blocks that keep everything on their device, whatever ``policies`` say about them and
            about blocks inside of them: ``apply(model, True, exclude=["layers.7"])`` recomputes all layers but that
            one. A module inside of a recomputed block is an excluded child.
        determinism_check: What is compared in the recomputation of blocks that do not say so themselves. ``"none"``:
            nothing. ``"default"``: shapes and dtypes of all saved tensors, and the values of some calls: the first
            three, and one in 64. ``"values"``: the values of every call.
        replace: Whether existing policies of the model are removed first, as by :func:`remove`.

    Raises:
        ConfigError: A selector matches nothing, or has no effect (on containers without a forward, or since later ones
            replace it on every block); one of ``exclude`` matches only modules without a policy; a field, value or
            keyword argument is wrong, a block has a policy already, or no layers were found. All faults are reported at
            once, and nothing is set.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> with apply(model, {"0": True, nn.Tanh: {"activation_checkpointing": "full"}}) as handle:
    ...     model(torch.ones(1, 4)).sum().backward()
    >>> apply(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))), True)
    Handle(Sequential; full: 1.0-3 (4x))
    >>> apply(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), True, exclude=["2", "3"])
    Handle(Sequential; full: 0-1 (2x))
    """
    check_keywords(apply, unknown)
    model = unwrap(model)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"apply: expected an nn.Module, got {shown(model)} · fix: apply(model, policies)")
    try:
        parse_determinism_check(determinism_check)
    except ConfigError as error:
        raise ConfigError(f"apply.{error}") from None
    excluded = _as_selectors(exclude)
    configs: dict[nn.Module, BlockConfig] = {}
    faults: list[str] = []
    matches: dict[Selector, tuple[list[nn.Module], set[str]]] = {}
    for selector, policy in policies_of(model, policies).items():
        try:
            fields = fields_of(policy)
            blocks = select(model, selector)
            for name, module in blocks:
                config = configs.setdefault(module, BlockConfig(name or type(model).__name__))
                config.update(fields)
        except ConfigError as error:
            faults.append(f"{describe(selector)!r}: {error}" if str(error)[:1] not in "'\"" else str(error))
            continue
        is_kept = all(value is None or value is False for value in fields.values())
        is_inherited = INHERITED & fields.keys()  # by the blocks inside
        if not is_kept and not is_inherited and not any(has_forward(module) for _, module in blocks):
            name, kind = blocks[0][0], type(blocks[0][1]).__name__
            what = f"{kind} has no forward, so this policy has no effect"
            faults.append(f"{describe(selector)!r}: {what} · fix: use {f'{name}.*'.removeprefix('.')!r}")
        matches[selector] = [module for _, module in blocks], set(fields)
    faults += _replaced_policies(matches)
    faults += [] if faults else _exclude(model, excluded, configs)
    plan = None
    if not faults:
        try:
            plan = resolve_policies([("", model)], configs, determinism_check)
        except ConfigError as error:
            faults.append(str(error))
    for name, module in model.named_modules():
        if not replace and module in configs and policy_of(module) is not None:
            fix = "remove() the handle, call graphckpt.remove(model), or apply(..., replace=True)"
            faults.append(f"{name or type(model).__name__}: it already has a policy · fix: {fix}")
    if faults or plan is None:
        lines = without_repeats(faults)
        raise ConfigError("\n".join(f"- {line}" for line in lines) if len(lines) > 1 else lines[0])
    # Only now: a call with faults does not change the present policies.
    if replace:
        remove(model)
    handle = Handle(model, plan)
    handle._watcher.advice = partial(_advice, _shown_policies(policies), tuple(map(_shown_selector, excluded)))
    return handle


def _is_list(selectors: Any) -> bool:
    """Whether it stands for its items: with a forward, a list of modules is a block itself."""
    return isinstance(selectors, nn.ModuleList) and not has_forward(selectors)


def _as_selectors(exclude: Any) -> list[Selector]:
    if isinstance(exclude, (str, type, re.Pattern, nn.Module)) and not _is_list(exclude):
        return [exclude]
    if not isinstance(exclude, Iterable) or isinstance(exclude, Mapping):
        what = f"expected selectors of blocks, got {shown(exclude)}"
        raise ConfigError(f"apply.exclude: {what} · fix: exclude=['layers.0']")
    return list(exclude)


def _exclude(model: nn.Module, selectors: Iterable[Selector], configs: dict[nn.Module, BlockConfig]) -> Iterator[str]:
    """Makes the selected modules keep everything, with the blocks inside of them; yields the faults."""
    # Before any selector acts: two of them may name the same block, and both have an effect.
    had_policy = {module for module, config in configs.items() if config.fields()}
    within_policy = {inner for module in had_policy for inner in module.modules()}
    for selector in selectors:
        try:
            blocks = select(model, selector)
        except ConfigError as error:
            yield f"exclude: {error}"
            continue
        has_effect = False
        for name, module in blocks:
            inside = [inner for inner in module.modules() if inner in had_policy]
            if not inside and (module not in within_policy or not has_forward(module)):
                continue  # of a class, another module may have one
            has_effect = True
            for inner in dict.fromkeys([module, *inside]):
                configs[inner] = BlockConfig(configs[inner].block if inner in configs else name or "model")
                configs[inner].update(_KEEP_ALL)
        if not has_effect:
            name, module = blocks[0]
            what, fix = "no policy acts on what it selects, so it has no effect", "leave it out"
            if module in within_policy:
                what, fix = f"{type(module).__name__} has no forward, so it has no effect", f"use {f'{name}.*'!r}"
            yield f"exclude: {describe(selector)!r}: {what} · fix: {fix}"
    if had_policy and all(configs[module].fields() == _KEEP_ALL for module in had_policy):
        yield "exclude: expected to leave a block with a policy, got none · fix: exclude fewer, or set no policies"


def _shown_selector(selector: Selector) -> str:
    """Returns a selector as source code, as far as a name describes it."""
    if isinstance(selector, re.Pattern):
        return repr(selector)
    return f'"{selector}"' if isinstance(selector, str) else describe(selector)


def _shown_policies(policies: Any) -> str:
    """Returns policies as an argument of a call: as they are if they are short, else ``policies``."""
    text = repr(policies)
    is_plain = isinstance(policies, (bool, str, Mapping, list, tuple)) and "<" not in text
    return text if is_plain and len(text) <= _SHOWN else "policies"


def _advice(policies: str, excluded: Sequence[str], names: Sequence[str]) -> str:
    """Says how to keep the blocks ``names``, in the words of the call of :func:`apply`."""
    listed = ", ".join([*excluded, *(f'"{name}"' for name in names)])
    return f"graphckpt.apply(model, {policies}, exclude=[{listed}])"


def _replaced_policies(matches: Mapping[Selector, tuple[list[nn.Module], set[str]]]) -> Iterator[str]:
    """Yields the selectors all of whose fields later ones replace."""
    last = {(module, field): s for s, (modules, fields) in matches.items() for module in modules for field in fields}
    for selector, (modules, fields) in matches.items():
        by = dict.fromkeys(last[module, field] for module in modules for field in fields)
        if by and selector not in by:
            later, name = " and ".join(repr(describe(each)) for each in by), repr(describe(selector))
            verb = "replaces" if len(by) == 1 else "replace"
            yield (
                f"{name}: this policy has no effect, since {later} {verb} it on every block · fix: put {name} last, or "
                "remove it"
            )


close_plans: WeakKeyDictionary[nn.Module, WeakMethod[Callable[[], None]]] = WeakKeyDictionary()
"""Callbacks that plan in a training, by model: a trainer may not notify them of an error that ended the training."""


def remove(model: nn.Module) -> None:
    """Removes all policies from ``model`` and its submodules, however they were set.

    If there is a handle, :meth:`Handle.remove` does the same. A copy of a model (``copy.deepcopy``, as for averages of
    weights) and an unpickled one keep the policies but have no handle; nor do modules under
    :func:`~graphckpt.checkpoint_wrapper`. Without policies it does nothing.

    Raises:
        ConfigError: ``model`` is not a module.

    >>> import copy
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    >>> handle = apply(model, {"*": True})
    >>> twin = copy.deepcopy(model)
    >>> remove(twin)
    >>> apply(twin, {"0": "selective"})
    Handle(Sequential; selective(matmul+attention): 0)
    """
    model = unwrap(model)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"remove: expected an nn.Module, got {shown(model)} · fix: remove(model)")
    modules = list(model.modules())
    for close in [close_plans.pop(module) for module in modules if module in close_plans]:
        if (method := close()) is not None:
            method()
    for module in modules:
        while isinstance(wrapper := module.__dict__.get("forward"), ForwardWrapper):
            wrapper.uninstall()
            if isinstance(wrapper, BlockForward) and wrapper.placement is not None:
                wrapper.placement.store.close()


def policies_of(model: nn.Module, policies: Policies) -> Mapping[Selector, Any]:
    """Returns policies in any form that :func:`apply` accepts as a mapping."""
    if isinstance(policies, PathLike) or (isinstance(policies, str) and policies.endswith(_FILES)):
        policies = policies_from_file(policies)
    if isinstance(policies, Mapping):
        names = dict(model.named_modules())
        fields = [key for key in policies if key in ("rule", *FIELDS, *OTHER_NAMES) and key not in names]
        if fields:
            what = f"expected selectors of blocks as keys, got {', '.join(map(repr, fields))}: fields of a block"
            raise ConfigError(f"apply: {what} · fix: {{'layers.*': {shown(dict(policies))}}}")
        return policies
    if isinstance(policies, (type, re.Pattern, nn.Module)) and not _is_list(policies):
        return {policies: True}
    if isinstance(policies, Iterable) and not isinstance(policies, str):
        selectors: list[Any] = list(policies)
        for selector in selectors:
            if isinstance(selector, (Mapping, list)):
                what = f"expected selectors in the list, got {shown(selector)}"
                raise ConfigError(f"apply: {what} · fix: one mapping, such as {{'layers.*': True}}")
        return dict.fromkeys(selectors, True)
    try:
        rule = parse_rule(policies)
    except ConfigError as error:
        fix = "use True for all layers, ['layers.*'] for blocks by name, or a mapping"
        raise ConfigError(f"apply: {error} · {fix}") from None
    if rule is None:
        raise ConfigError("apply: expected policies, got None · fix: use True for all layers, or a mapping")
    layer_names = layers(model)
    if not layer_names:
        fix = "name the blocks, such as apply(model, {'blocks.*': True})"
        raise ConfigError(f"apply: no list of layers was found in {type(model).__name__} · fix: {fix}")
    return dict.fromkeys(layer_names, rule)


def policies_from_file(path: str | PathLike[str]) -> Mapping[Selector, Any]:
    """Reads a mapping from name patterns to policies from a YAML or JSON file, or the policies of a saved plan.

    Plans that earlier versions saved have them in a section ``blocks``.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        repeated = _repeated_key(compose(text))
        content = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read: {error} · fix: name a file that Plan.save has written") from None
    if repeated is not None:
        raise ConfigError(f"{path}: expected each key once, got {repeated!r} twice · fix: remove one of them")
    policies = content.get("policies", content.get("blocks", content)) if isinstance(content, Mapping) else content
    if not isinstance(policies, Mapping):
        fix = "write {'layers.*': True}, or a file that Plan.save has written"
        raise ConfigError(f"{path}: expected a mapping of policies, got {type(policies).__name__} · fix: {fix}")
    return policies


def _repeated_key(node: Any) -> str | None:
    if not isinstance(node, yaml.MappingNode):
        return None
    keys = [key.value for key, _ in node.value]
    inner = (_repeated_key(value) for _, value in node.value)
    return next((key for key in keys if keys.count(key) > 1), None) or next(filter(None, inner), None)
