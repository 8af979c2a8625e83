"""The schema of a run's config: pydantic checks it, and every fault is reported at once with its key and its fix."""

from __future__ import annotations

import inspect
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, final, get_args, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, SchemaValidator, core_schema
from torch import nn
from torch.optim import Optimizer

from graphckpt.config.lazy import DeferredCall, dotted_name, parameters, read_calls
from graphckpt.errors import ConfigError, did_you_mean, first_line
from graphckpt.train.data.text_data import Data
from graphckpt.train.loop import HookBase
from graphckpt.train.parallel.sharding import is_sharded
from graphckpt.train.settings import TrainConfig
from graphckpt.train.tasks.base import Task
from graphckpt.train.tasks.causal_lm import CausalLM

_log = logging.getLogger("graphckpt")

_PLAIN = {bool, int, float, str, bytes, type(None), Path}
_FEW = 12  # keys that fit into a message
_A_CALL = "a call · fix: write LazyCall(target)(...), or a mapping with _target_"
_EXPECTED = {
    "bool_type": "bool",
    "callable_type": _A_CALL,
    "dataclass_type": "a section",
    "dict_type": "a mapping",
    "float_type": "float",
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "int_type": "int",
    "is_instance_of": "{class}",
    "less_than": "less than {lt}",
    "less_than_equal": "{le} or less",
    "list_type": "a list",
    "literal_error": "{expected}",
    "string_type": "str",
    "too_long": "{max_length} values",
    "too_short": "{min_length} values",
    "tuple_type": "a list",
}
"""The expectation to print, by pydantic's name of the error; all others have pydantic's text."""


@final
@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A checked config, before its calls."""

    train: TrainConfig
    model: Callable[..., nn.Module]
    optim: Callable[..., Optimizer]
    data: Callable[..., Data]
    task: Callable[..., Task] = CausalLM
    """The task; causal language modeling by default."""
    hooks: list[Callable[..., HookBase]] = field(default_factory=list)
    """Additional hooks. They run after the trainer's, in this order, and before a snapshot is taken."""
    import_from: str | None = None
    """Folder of the modules named in the config, if they are neither installed nor in the folder of its file."""

    def faults(self) -> Iterator[str]:
        """Yields a fault for an infinite setting of the optimizer, and for ``params`` that do not take the model."""
        arguments = self.optim.arguments if isinstance(self.optim, DeferredCall) else {}
        for key, value in arguments.items():
            if isinstance(value, float) and math.isinf(value):
                yield f"optim.{key}: expected a finite number, got {value}"
        params = arguments.get("params")
        if params is not None and not isinstance(params, DeferredCall):
            fix = "write LazyCall(get_default_optimizer_params)(...), which takes the model, or leave the key out"
            yield f"optim.params: expected a call, got {params!r} · fix: {fix}"


def check(config: DictConfig) -> tuple[RunConfig | None, list[str]]:
    """Reads a config, and returns all its faults; with faults there is no ``RunConfig``."""
    try:
        plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        return None, [key + first_line(error)]
    faults: list[str] = []
    values = {str(key): read_calls(value, str(key), faults) for key, value in plain.items()}
    # In a holder, as `read` removes what is rejected from it; its key is empty, since faults begin with a section.
    run, more = read(RunConfig, {"": values}, "")
    # One fault for each key, the first: a seed of nan would be reported twice, as expected to be a number, and an int.
    for further in (more, call_faults(values)):
        reported = {fault.partition(": ")[0] for fault in faults}
        faults += [fault for fault in further if fault.partition(": ")[0] not in reported]
    return (None if faults else run), faults


# Note [All faults at once]
#
# pydantic reports all faults of types in one pass, but creates no dataclass then, and `faults()` needs one. So `read`
# removes the values that were rejected and validates the rest again, with defaults in their places:
#
#     {"seed": "x", "train_iter": 5, "device": "meta"}   1st turn: seed: expected int, got 'x' (str); removed
#     {"train_iter": 5, "device": "meta"}                2nd turn: valid; `faults()` adds: device: expected a device ...
#
# Each turn removes a value, so this ends. A required key that is missing has no default to take: then the sections of
# the dataclass are read one by one. A default may add a fault that goes once the value is right, such as a size that
# does not divide another one.


def read(hint: Any, holder: dict[str, Any], key: str, prefix: str = "") -> tuple[Any, list[str]]:
    """Reads ``holder[key]`` as the type ``hint``; returns all faults with it, each beginning with its dotted key.

    A whole float is an int (``1e3``), an int a float, a list a tuple, and a mapping a dataclass: its fields are the
    keys. Nothing else is converted: a bool is not a number, and text is not one either. A dataclass may have a method
    ``faults()`` for what its types cannot express, and the class attributes ``FOREIGN``, which says of keys of other
    programs why they have no meaning here, and ``ALIASES``, our names of theirs.
    """
    faults: list[str] = []
    validator = _validator(hint)
    while key in holder and validator is not None:
        try:
            instance = validator.validate_python(holder[key])
        except ValidationError as error:
            rejections = _rejections(error, hint, holder, key)
        except TypeError:  # in a third-party signature: a protocol, of which nothing is an instance
            return holder[key], faults
        else:
            return instance, [*faults, *_own_faults(instance, prefix + key)]
        for rejected in rejections:
            reported = {fault.partition(": ")[0] for fault in faults}
            faults += [fault for fault in rejected.remove(holder, prefix) if fault.partition(": ")[0] not in reported]
        if rejections[0].kind == "missing":  # the dataclass cannot be made, but those in it can
            sections = [(name, inner) for name, inner in get_type_hints(hint).items() if is_dataclass(inner)]
            for name, inner in sections:
                faults += read(inner, holder[key], name, f"{prefix}{key}.".removeprefix("."))[1]
            return None, faults
    return holder.get(key), faults


def call_faults(node: Any) -> Iterator[str]:
    """Checks the arguments of all calls in a config against the signatures of their targets, which are not called."""
    if isinstance(node, Mapping | list | tuple):
        for value in node.values() if isinstance(node, Mapping) else node:
            yield from call_faults(value)
    if not isinstance(node, DeferredCall):
        return
    signature, takes_any = parameters(node.target)
    good = {}
    for key, value in list(node.arguments.items()):
        where = f"{node.where}.{key}"
        yield from call_faults(value)
        if key not in signature:
            if not takes_any:
                yield _unknown(where, key, list(signature), of=f" of {dotted_name(node.target).rpartition('.')[2]}")
            continue
        hint = signature[key].annotation
        if hint is signature[key].empty or (_has_call(value) and not set(get_args(hint) or (hint,)) <= _PLAIN):
            hint = Any  # what a call returns is only seen when it is called
        instance, faults = read(hint, node.arguments, key, f"{node.where}.")
        if not faults and _is_negative_count(signature[key].default, key, instance):
            faults = [f"{where}: expected 1 or more, got {instance}"]
        yield from faults
        if not faults:
            good[key] = instance
            if type(instance) is int:
                node.arguments[key] = instance  # of 1e3
    if is_dataclass(node.target) and hasattr(node.target, "faults"):
        # The target is not called until all of the config is good, but a dataclass of ours only stores its arguments:
        # so it is made here, of the good ones, for the faults that its types cannot express.
        required = [one.name for one in fields(node.target) if one.default is one.default_factory is MISSING]
        if all(name in good for name in required):
            yield from _own_faults(node.target(**good), node.where)


def _is_negative_count(default: Any, key: str, value: Any) -> bool:
    """Whether ``value`` is below zero and ``key`` counts something, by its name and its default.

    Transformers takes ``n_head=-1`` and fails in the first forward, in words about shapes.
    """
    is_count = key.startswith(("n_", "num_")) or key.endswith(("_size", "_layers", "_heads", "_dim"))
    return is_count and isinstance(default, int) and default > 0 and isinstance(value, int) and value < 0


def _own_faults(instance: Any, where: str) -> Iterator[str]:
    if is_dataclass(instance) and not isinstance(instance, type | DeferredCall):
        prefix = f"{where}." if where else ""
        for one in fields(instance):
            yield from _own_faults(getattr(instance, one.name), prefix + one.name)
        if hasattr(instance, "faults"):
            yield from (prefix + fault for fault in instance.faults())


def _has_call(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, DeferredCall) or any(map(_has_call, items))


def _unknown(where: str, key: str, names: list[str], of: str = "") -> str:
    some = f" · fix: use one of {', '.join(names)}" if 0 < len(names) <= _FEW else ""
    initials = "".join(word[:1] for word in key.split("_"))  # of learning_rate: lr
    hint = did_you_mean(key, names) or (did_you_mean(initials, [initials]) if initials in names else "")
    return f"{where}: no such key{of}{hint or some}"


def _validator(hint: Any) -> SchemaValidator | None:
    try:
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
        except PydanticUserError:  # of a dataclass, which would have to bring its config itself
            adapter = TypeAdapter(hint)
        return SchemaValidator(_strict(adapter.core_schema))
    except Exception:  # in a third-party signature: a name for type checkers, or a type that pydantic cannot check
        return None


def _strict(schema: Any) -> Any:
    """Returns a schema that converts no plain values, and takes no unknown keys.

    pydantic's strict mode is not it: there a dataclass must be an instance, and a config has a mapping.
    """
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: value if key == "metadata" else _strict(value) for key, value in schema.items()}
    match schema.get("type"):
        case "int":
            return core_schema.no_info_before_validator_function(_whole_float_as_int, {**schema, "strict": True})
        case "bool" | "float" | "str" | "bytes":
            schema["strict"] = True
        case "dataclass-args":
            schema["extra_behavior"] = "forbid"
    return schema


def _whole_float_as_int(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**64 else value


class _Rejection(NamedTuple):
    kind: str
    """pydantic's name of the error."""
    path: tuple[Any, ...]
    """Keys and indices, from the holder."""
    owner: Any
    """The innermost dataclass around it."""
    value: Any
    expected: list[str]
    """Descriptions of good values, one for each member of a union."""

    def remove(self, holder: Any, prefix: str) -> list[str]:
        """Removes the value, so that its key has its default, or gives it our key; returns the faults."""
        full = _dotted(prefix, self.path)
        section, key = holder, self.path[0]
        for step in self.path[1:]:
            if not isinstance(section.get(key), dict):  # a list goes as a whole
                break
            section, key = section[key], step
        if self.kind == "unexpected_keyword_argument":
            return self._rename(section, full)
        section.pop(key, None)
        return [f"{full}: {'is missing · fix: give it a value' if self.kind == 'missing' else self._fault()}"]

    def _rename(self, section: dict[str, Any], full: str) -> list[str]:
        key = self.path[-1]
        value = section.pop(key)
        if reason := getattr(self.owner, "FOREIGN", {}).get(key):
            return [f"{full}: has no meaning here, {reason} · fix: leave the key out"]
        name = getattr(self.owner, "ALIASES", {}).get(key)
        if name is None:
            return [_unknown(full, str(key), [one.name for one in fields(self.owner)])]
        if section.get(name) is None:
            _log.warning("graphckpt: %s: read as %s, which is its name here", full, name)
            section[name] = value
        elif section[name] != value:
            return [f"{full}: {value!r}, and {name} is {section[name]!r} · fix: leave {key} out"]
        return []

    def _fault(self) -> str:
        value = self.value
        expected = f"expected {' or '.join(dict.fromkeys(self.expected))}"
        if self.expected == [_A_CALL]:
            return expected
        if self.kind == "invalid_key":
            return f"expected text as a key, got {self.path[-1]!r} · fix: quote it"
        if self.kind.startswith(("greater", "less")):
            return f"{expected}, got {value}"
        choices = re.findall(r"'(\w+)'", expected) if isinstance(value, str) else []
        if isinstance(value, DeferredCall):
            return f"{expected}, got a call of {dotted_name(value.target)!r}"
        kind = "null" if value is None else type(value).__name__
        return f"{expected}, got {value!r} ({kind})" + (did_you_mean(value, choices) if choices else "")


def _rejections(error: ValidationError, hint: Any, holder: dict[str, Any], key: str) -> list[_Rejection]:
    by_path: dict[tuple[Any, ...], _Rejection] = {}
    for details in error.errors(include_url=False, include_input=False):
        one = _rejection(details, hint, holder, key)
        if one.kind == "too_short":  # there is an error for each value that is missing; the last one has their number
            by_path.pop(one.path, None)
        by_path.setdefault(one.path, one._replace(expected=[])).expected.extend(one.expected)
    for path in list(by_path):  # a list that is wrong in one item is also rejected by the other members of a union
        for length in range(1, len(path)):
            by_path.pop(path[:length], None)
    # What is missing comes last: if it is the first, nothing is left to remove that could make the rest valid.
    return sorted(by_path.values(), key=lambda one: one.kind == "missing")


def _rejection(details: ErrorDetails, owner: Any, holder: dict[str, Any], key: str) -> _Rejection:
    """Follows the location of an error, which names the members of unions too."""
    kind, steps, context = details["type"], details["loc"], details.get("ctx", {})
    path: list[Any] = [key]
    value = holder[key]
    # ("activation_checkpoint", "policies", "h.*", "bool") is a location: the last step names the member of a union that
    # has rejected the value, and is not a key. Only steps that lead into the value are followed.
    for step in steps:
        is_item = isinstance(value, list | tuple) and isinstance(step, int) and step < len(value)
        if is_item or (isinstance(value, dict) and step in value):
            value = value[step]
            inner = get_type_hints(owner).get(str(step)) if is_dataclass(owner) else None
            owner = inner if is_dataclass(inner) else owner
            path.append(step)
        elif kind == "missing" and step == steps[-1]:
            if isinstance(value, dict):
                path.append(step)
            elif isinstance(step, int):  # of a tuple
                kind, context = "too_short", {"min_length": step + 1}
    # PositiveInt is `gt=0` for pydantic, but a reader expects 1 or more.
    if isinstance(context.get("gt"), int):
        kind, context = "greater_than_equal", {"ge": context["gt"] + 1}
    kind = "invalid_key" if steps[-1:] == ("[key]",) else kind
    plain = {key: f"{value:g}" if isinstance(value, float) else value for key, value in context.items()}
    expected = _EXPECTED.get(kind, "").format(**plain) or details["msg"].removeprefix("Input should be ")
    return _Rejection(kind, tuple(path), owner, value, [expected])


def _dotted(prefix: str, path: tuple[Any, ...]) -> str:
    """Returns the dotted key of a path.

    >>> _dotted("train.", ("blocks", "h.*", 0))
    "train.blocks['h.*'][0]"
    """
    text = prefix + str(path[0])
    for step in path[1:]:
        text += f".{step}" if str(step).isidentifier() else f"[{step!r}]"
    return text.removeprefix(".")


def model_of(run: RunConfig) -> nn.Module:
    model: object = run.model()
    if not isinstance(model, nn.Module):
        what = f"model: expected an nn.Module, got {type(model).__name__}"
        raise ConfigError(f"{what} · fix: call a class of modules")
    return model


def optimizer_of(run: RunConfig, model: nn.Module, device: str | None = None) -> Optimizer:
    assert isinstance(run.optim, DeferredCall)
    described = run.optim.arguments.get("params")
    params = model.parameters() if described is None else described(model=model)
    kind = device or next((weight.device.type for weight in model.parameters() if not weight.is_meta), "cpu")
    is_scaled = run.train.amp.enabled and run.train.amp.dtype == "float16"
    settings = {} if is_scaled else fast_settings(run.optim, kind)
    optimizer: object = run.optim(params=params, **settings)
    if not isinstance(optimizer, Optimizer):
        what = f"optim: expected an Optimizer, got {type(optimizer).__name__}"
        raise ConfigError(f"{what} · fix: call a class of optimizers")
    for group in optimizer.param_groups if "fused" in settings else ():
        if len({is_sharded(weight) for weight in group["params"]}) > 1:
            group["fused"] = (
                None  # tensor parallelism shards some weights, and a kernel takes DTensors or plain tensors
            )
    return optimizer


def fast_settings(optim: DeferredCall, device: str) -> dict[str, bool]:
    """Returns ``fused`` and ``capturable`` for an optimizer of PyTorch on CUDA, unless set in the config.

    >>> from torch.optim import SGD, AdamW
    >>> fast_settings(DeferredCall(AdamW, {}), "cuda"), fast_settings(DeferredCall(AdamW, {}), "cpu")
    ({'fused': True, 'capturable': True}, {})
    >>> fast_settings(DeferredCall(AdamW, {"foreach": True}), "cuda"), fast_settings(DeferredCall(SGD, {}), "cuda")
    ({'capturable': True}, {'fused': True})
    """
    if device != "cuda" or not isinstance(optim.target, type):
        return {}
    names = inspect.signature(optim.target).parameters
    free = [name for name in ("fused", "capturable") if name in names and name not in optim.arguments]
    return {name: True for name in free if name != "fused" or "foreach" not in optim.arguments}
