"""The files and fields of a snapshot: what each may hold, by itself and for the run that reads it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, final

import torch
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    Strict,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
)
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import TypedDict

from graphckpt.errors import GraphckptError, first_line, shown
from graphckpt.train.parallel.sharding import placeholder_shape

WEIGHTS = "model.safetensors"
"""File of the weights, which Transformers finds by this name too."""
SHARDS = "shares"
"""Folder of sharded tensors, written by each rank; see ``dcp.py``."""
MANIFEST = "snapshot.json"
"""Written last: the progress of the run, and size and checksum of every other file."""
STATE = "{}.pt"
"""File of a state: ``graph`` is optimizer, schedule and scaler, ``trainer`` the rest."""
STAGES = "pipeline_parallel_size"
STEP, OPTIMIZER, SCHEDULER = "System-Train-TrainStep", "System-Train-Optimizer-0", "System-Train-LRScheduler-0"
_SCALER = "System-Train-GradScaler"
OWN_CHECKSUMS = ".distcp"  # a shard, which has checksums within
FORMAT = 2  # of the folder; a change of what is written needs a new number

IN_LINE = ("consumed_samples", "time", "data_time", "total_throughput", "lr", "rss_bytes", "peak_rss_bytes")
"""Metrics of every line of the log."""
_NOTHING = object()
_PHRASES = {  # of pydantic
    "Input should be ": "",
    "Value error, ": "",
    "Invalid JSON:": "valid JSON:",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "Field required": "a value",
}


@final
class SnapshotError(GraphckptError, RuntimeError):
    """A snapshot is missing, broken, or of another model."""


@final
class FieldError(ValueError):
    """A field is missing, of another type, or out of its range."""

    def __init__(self, field: str, expected: str, got: object) -> None:
        nothing = "nothing" if got is _NOTHING else ""
        super().__init__(f"{field or '(all of it)'}: expected {expected}, got {nothing or _shown(got)}")


@contextmanager
def reading(file: Path, fix: str = "") -> Iterator[None]:
    """Names the file of a field that is wrong, and the fix if there is one."""
    advice = f" · fix: {fix}" if fix else ""
    try:
        yield
    except FieldError as error:
        raise SnapshotError(f"{file}: {error}{advice}") from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
        raise SnapshotError(f"{file}: is broken ({type(error).__name__}: {first_line(error)}){advice}") from error


def validate(kind: Any, value: Any, where: str = "", *, is_json: bool = False) -> Any:
    """Returns what pydantic makes of a value of this type."""
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    try:
        return adapter.validate_json(value) if is_json else adapter.validate_python(value)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        expected = fault["msg"]
        for phrase, plain in _PHRASES.items():
            expected = expected.replace(phrase, plain)
        path = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in fault["loc"])
        got = _NOTHING if fault["type"] == "missing" else fault["input"]
        raise FieldError(f"{where}{''.join(path)}".removeprefix("."), expected, got) from error


def _shown(value: object) -> str:
    if isinstance(value, Tensor) and value.ndim:
        return f"a tensor of {value.dtype} and shape {list(value.shape)}"
    try:
        return shown(value)
    except (ValueError, RecursionError):  # an int of more than 4300 digits; a list in itself
        return "a value too long to print"


def _if(is_good: Callable[[Any], bool], expected: str) -> AfterValidator:
    def check(value: Any) -> Any:
        if not is_good(value):
            raise ValueError(expected)
        return value

    return AfterValidator(check)


# ---- the description

Count = Annotated[int, Strict(), Field(ge=0, le=2**53)]  # what JSON's numbers hold
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Text = Annotated[str, Strict(), Field(pattern=r"\A\PC+\z", max_length=1000)]  # printable, and not empty
_Positive = Annotated[Count, Field(ge=1)]
_Uint32 = Annotated[int, Strict(), Field(ge=0, lt=2**32)]
_Gauss = Annotated[Number, Field(ge=-40, le=40)]  # in standard deviations; no generator comes close
_Bytes = Annotated[InstanceOf[Tensor], _if(lambda value: value.dtype == torch.uint8, "a tensor of torch.uint8")]
_Scalar = Annotated[
    InstanceOf[Tensor], _if(lambda value: value.ndim == 0 and value.is_floating_point(), "a floating-point scalar")
]


class FileEntry(TypedDict):
    """A file in the manifest."""

    bytes: Annotated[int, Strict(), Field(ge=0, lt=2**63)]
    crc32: NotRequired[_Uint32]


def _check_files(files: dict[str, FileEntry]) -> dict[str, FileEntry]:
    for name, entry in files.items():
        if Path(name).name != name.removeprefix(f"{SHARDS}/") or Path(name).name in {"", ".", ".."}:
            raise ValueError(f"the name of a file in the folder or in {SHARDS}, not {name!r}")
        if "crc32" not in entry and not name.endswith(OWN_CHECKSUMS):
            raise ValueError(f"a crc32 of {name!r}")
    for name in (STATE.format("graph"), STATE.format("trainer"), WEIGHTS):
        if name not in files and (name != WEIGHTS or not any(other.startswith(f"{SHARDS}/") for other in files)):
            raise ValueError(f"an entry {name!r}")
    return files


def _check_done(done: int, info: ValidationInfo) -> int:
    if done != info.data.get("iteration", done - 1) + 1 or done > info.data.get("consumed_samples", done):
        raise ValueError("iteration + 1, and at most consumed_samples")
    return done


class _Data(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    num_samples: _Positive
    tokens_each: Count
    tokens: Text | None


class _Machine(TypedDict):
    torch: Text
    threads: _Positive
    data_parallel_size: NotRequired[_Positive]
    tensor_parallel_size: NotRequired[_Positive]
    pipeline_parallel_size: NotRequired[_Positive]


class RunInfo(TypedDict):
    """``snapshot.json``."""

    format: Literal[2]
    run: Text
    """An id of the run and of all runs resumed from it."""
    iteration: Count
    consumed_samples: Count
    done: Annotated[_Positive, AfterValidator(_check_done)]
    """Iterations done."""
    data: _Data
    """Values that identify the data."""
    machine: _Machine
    """Values that affect the rounding of sums."""
    metrics: dict[str, Number]
    optimizer_states: NotRequired[Count]
    """Number of parameters with optimizer state; missing in snapshots of versions that did not record it."""
    files: Annotated[dict[str, FileEntry], AfterValidator(_check_files)]


class _Random(TypedDict):
    """The generators of one rank."""

    cpu: Annotated[_Bytes, _if(lambda state: state.shape == torch.get_rng_state().shape, "the state of a generator")]
    devices: list[tuple[Text, _Bytes]]
    numpy: tuple[
        Literal["MT19937"],
        Annotated[list[_Uint32], Field(min_length=624, max_length=624)],
        Annotated[Count, Field(le=624)],
        Annotated[Count, Field(le=1)],
        _Gauss,
    ]
    python: tuple[
        Literal[3],
        Annotated[
            tuple[_Uint32, ...],
            Field(min_length=625, max_length=625),
            _if(lambda state: state[-1] <= 624, "a position of 624 or less at the end"),
        ],
        _Gauss | None,
    ]


class _Settings(TypedDict):
    """Those of the run: a resume sees what has changed."""

    seed: Annotated[int, Strict(), Field(ge=0, le=2**63)]
    optimizer: Text
    groups: list[dict[str, Any]]
    schedule: dict[str, Any]


class _Late(TypedDict):
    iteration: Count
    losses: list[Text]
    metrics: dict[str, Number]


class _LogState(TypedDict):
    """The sums since the last line of the log, and on a device a line that is not written yet."""

    sums: dict[Text, _Scalar]
    iterations: Count
    late: NotRequired[
        Annotated[
            _Late,
            _if(lambda late: {*late["losses"], *IN_LINE} <= late["metrics"].keys(), "the metrics of a line of the log"),
        ]
    ]


class _BestState(TypedDict):
    best: Number | None


_Hooks = TypedDict(
    "_Hooks",
    {
        "LogHook-0": Annotated[  # present in every run
            _LogState,
            _if(
                lambda state: bool(state["iterations"]) == bool(state["sums"]) == ("total_loss" in state["sums"]),
                "sums with total_loss, of one iteration or more",
            ),
        ],
        "BestHook-0": NotRequired[_BestState],
    },
)


class TrainerState(TypedDict):
    """``trainer.pt``."""

    random: _Random
    random_of_each: NotRequired[list[_Random]]
    pipeline_parallel_size: NotRequired[_Positive]
    settings: _Settings
    buffers: dict[str, Any]
    extra: dict[str, Any]
    hooks: _Hooks


class _Group(TypedDict):
    params: list[Count]


# ---- compared with the run that reads it

_FREE = {"lr", "weight_decay", "dampening", "eps", "lr_decay", "maximize", "nesterov", "foreach", "fused", "capturable"}
"""Settings that say nothing of what an optimizer keeps."""
_BELOW_ONE = {"betas", "momentum", "dampening"}
_FACTORED = {"row_var", "col_var"}  # of Adafactor: one dim of the parameter is missing


def check_trainer(
    trainer: Any,
    *,
    buffers: Mapping[str, Tensor],
    unsaved: Mapping[str, Tensor],
    extra: list[str],
    machine: Mapping[str, Any],
) -> None:
    """Checks ``trainer.pt`` for a model with these buffers and extra state; it has to contain the ``unsaved`` ones.

    ``machine`` is that of the manifest, which says how many processes have written the snapshot.
    """
    validate(TrainerState, trainer)
    stages, streams = machine.get(STAGES, 1), len(trainer.get("random_of_each", [trainer["random"]]))
    if streams != (expected := stages * machine.get("data_parallel_size", 1)):
        raise FieldError("random_of_each", f"the generators of {expected} processes", streams)
    if (saved := trainer.get(STAGES, 1)) != stages:
        raise FieldError(STAGES, str(stages), saved)
    kinds: dict[str, Any] = {}
    for name, own in buffers.items():
        kind = Annotated[InstanceOf[Tensor], _if(partial(_is_alike, own), _shown(own))]
        kinds[name] = kind if name in unsaved else NotRequired[kind]
    validate(_fields(kinds, extra="forbid"), trainer["buffers"], "buffers")
    validate(_fields(dict.fromkeys(extra, Any), extra="forbid"), trainer["extra"], "extra")


def _is_alike(own: Tensor, value: Tensor) -> bool:
    return (value.dtype, value.ndim) == (own.dtype, own.ndim)


def check_graph(
    graph: Any,
    like: Mapping[str, Any],
    optimizer: Optimizer,
    scheduler: object,
    *,
    done: int,
    num_states: int | None,
    has_changed: bool,
) -> None:
    """Checks ``graph.pt`` against the state of the graph that it is for, with its optimizer and schedule.

    ``has_changed`` says that the saved param groups and schedule will not be used, as the run has others.
    """
    groups = like[OPTIMIZER]["param_groups"]
    validate(_fields({OPTIMIZER: _fields({"param_groups": list[_Group]})}), graph)
    sizes, saved = ([len(group["params"]) for group in part] for part in (groups, graph[OPTIMIZER]["param_groups"]))
    if sizes != saved:
        raise FieldError(f"{OPTIMIZER}.param_groups", f"groups of {sizes} parameters", saved)
    steps = range(0 if _SCALER in graph else done, done + 1)  # an update that overflowed is not counted
    is_count = _if(
        lambda step: step.shape == () and step.dtype == torch.int64 and int(step) in steps,
        f"an int64 scalar from {steps[0]} to {done}",
    )
    validate(_fields({STEP: Annotated[InstanceOf[Tensor], is_count]}), graph)
    is_known = _is_of_pytorch(optimizer)  # of other optimizers, nothing is known of what they keep
    parameters = [(group, parameter) for group in optimizer.param_groups for parameter in group["params"]]
    states = dict[Annotated[Count, Field(lt=len(parameters))], dict[Text, Any]]
    is_complete = _if(lambda states: num_states in {None, len(states)}, f"the states of {num_states} parameters")
    kinds = [_group_like({} if has_changed else group, group["params"], is_known=is_known) for group in groups]
    optimizer_kind = _fields({"param_groups": _tuple(kinds), "state": Annotated[states, is_complete]})
    scaler = like.get(_SCALER, torch.amp.GradScaler("cpu").state_dict())
    fields = {OPTIMIZER: optimizer_kind, _SCALER: NotRequired[_like(scaler)]}
    if SCHEDULER in like and not has_changed:
        fields[SCHEDULER] = _schedule_like(like[SCHEDULER] if _is_of_pytorch(scheduler) else {}, int(graph[STEP]))
    validate(_fields(fields), graph)
    if is_known:
        _check_states(graph[OPTIMIZER]["state"], parameters, sorted(optimizer.defaults.keys() - _FREE), done)


def is_of_states(optimizer: Optimizer, key: str, before: Any, after: Any) -> bool:
    """Whether the states of an optimizer depend on a setting that has changed, so that they would not fit it.

    They have other entries if a setting such as ``amsgrad`` or ``momentum`` is turned on or off; two settings only say
    how they begin.

    >>> adam = torch.optim.Adam([torch.zeros(1)])
    >>> is_of_states(adam, "amsgrad", False, True), is_of_states(adam, "weight_decay", 0.0, 0.1)
    (True, False)
    """
    if key == "initial_accumulator_value" or (key == "lr" and isinstance(optimizer, torch.optim.Rprop)):
        return True
    is_set = None not in (before, after)  # not a key of another version, nor one that leaves the choice to PyTorch
    return is_set and key in optimizer.defaults and key not in _FREE and bool(before) != bool(after)


def _is_of_pytorch(part: object) -> bool:
    return type(part).__module__.startswith("torch.optim")


def _fields(fields: Mapping[str, Any], *, extra: Literal["allow", "forbid"] = "allow") -> Any:
    make: Any = TypedDict
    kind = make("fields", dict(fields))
    kind.__pydantic_config__ = ConfigDict(extra=extra)
    return kind


def _tuple(kinds: Iterable[Any]) -> Any:
    make: Any = tuple
    return make[tuple(kinds)]


def _like(value: Any, limit: float | None = None) -> Any:
    """Returns the type of values like one of a run that has just begun; not below zero, if that one is not."""
    if value is None or isinstance(value, bool):  # flags such as foreach, for which None means to choose
        return Annotated[bool, Strict()] | None
    if isinstance(value, Tensor) and value.ndim:
        return Annotated[InstanceOf[Tensor], _if(partial(_is_alike, value), _shown(value))]
    if isinstance(value, int | float | Tensor):
        limits = Field(ge=0 if value >= 0 else -math.inf, le=limit, allow_inf_nan=math.isinf(value))
        return Annotated[float, Strict(), limits, BeforeValidator(_plain)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return _fields({key: _like(one) for key, one in value.items()})
    if isinstance(value, list | tuple):
        return _tuple(_like(one, limit) for one in value)
    return Text if isinstance(value, str) else Any


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.ndim == 0 else value


def _group_like(group: Mapping[str, Any], params: list[int], *, is_known: bool) -> Any:
    kinds = {
        key: _like(value, 1 if key in _BELOW_ONE else None) if is_known or value is not None else Any
        for key, value in group.items()
    }
    is_same = _if(lambda names: names == params, "the parameters in their order")
    return _fields({**kinds, "params": Annotated[list[Count], is_same]})


def _schedule_like(schedule: Mapping[str, Any], steps: int) -> Any:
    limits = {"last_epoch": (steps, steps), "_step_count": (0, steps + 2)}  # not every schedule counts there
    counts = {key: Annotated[Count, Field(ge=low, le=high)] for key, (low, high) in limits.items()}
    return _fields({key: counts.get(key, _like(value)) for key, value in schedule.items()})


def _check_states(
    states: Mapping[int, Mapping[str, Any]], parameters: list[tuple[Any, Tensor]], settings: list[str], done: int
) -> None:
    """Compares the states of parameters that an optimizer treats alike: the names and kinds of their entries."""
    layouts: dict[tuple[Any, ...], dict[str, str]] = {}
    for number, entries in states.items():
        group, parameter = parameters[number]
        field = f"{OPTIMIZER}.state[{number}]"
        layout = {name: _kind(name, value, parameter, f"{field}.{name}", done) for name, value in entries.items()}
        flags = [bool(group[name]) for name in settings if name in group]
        expected = layouts.setdefault((*flags, min(parameter.ndim, 2)), layout)  # Adafactor tells matrices apart
        if not layout or layout != expected:
            raise FieldError(field, str(expected or "names and tensors"), layout)


def _kind(name: str, value: Any, like: Tensor, field: str, done: int) -> str:
    shape = list(value.shape) if isinstance(value, Tensor) else placeholder_shape(value)
    if name == "step":
        validate(_like(0, limit=done), value, field)
        return "a count"
    if value is None or name in _FACTORED:
        return type(value).__name__
    if shape is None:
        validate(Number, value, field)
        return "a number"
    is_shaped = shape == list(like.shape)
    is_integer = isinstance(value, Tensor) and like.is_floating_point() and not value.is_floating_point()
    if (shape and not is_shaped) or is_integer:
        raise FieldError(field, f"a tensor of {like.dtype} and shape {list(like.shape)}", value)
    return "a tensor" if is_shaped else "a scalar"
