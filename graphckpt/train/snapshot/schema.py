"""The files and fields of a snapshot, with the checks of their values, alone and for the run that reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, final

import torch
from pydantic import AfterValidator, ConfigDict, Field, InstanceOf, Strict, TypeAdapter, ValidationError, ValidationInfo
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import TypedDict

from graphckpt.errors import GraphckptError, first_line, shown
from graphckpt.train.parallel.sharding import extracted_shapes

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
FORMAT = 2
"""The format of a new snapshot. A change takes the next number, and an entry in ``run_state.LACKS`` for this one."""
READABLE = range(max(1, FORMAT - 2), FORMAT + 1)
"""Formats that are read: this one, and the two before it."""

_NOTHING = object()
# "Input should be greater than or equal to 1" becomes "done: expected at least 1, got 0".
_PHRASES = {  # of pydantic
    "Input should be ": "",
    "Value error, ": "",
    "Invalid JSON:": "valid JSON:",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "Field required": "a value",
}


class SnapshotError(GraphckptError, RuntimeError):
    """A snapshot is missing, broken, or of another model."""


@final
class FormatError(SnapshotError):
    """A snapshot is of a format that another version of graphckpt reads."""


@final
class FieldError(ValueError):
    def __init__(self, field: str, expected: str, got: object) -> None:
        shown_value = "nothing" if got is _NOTHING else _shown(got)
        super().__init__(f"{field or '(all of it)'}: expected {expected}, got {shown_value}")


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


# ---- the description

Count = Annotated[int, Strict(), Field(ge=0, le=2**53)]  # what JSON's numbers hold
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Text = Annotated[str, Strict(), Field(pattern=r"\A\PC+\z", max_length=1000)]  # printable, and not empty
_Positive = Annotated[Count, Field(ge=1)]
_Uint32 = Annotated[int, Strict(), Field(ge=0, lt=2**32)]


class FileEntry(TypedDict):
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


class _Format(TypedDict):
    format: Annotated[int, Strict()]


def read_format(content: bytes, file: Path) -> int:
    """Returns the format of a manifest, of which another format may have all other fields changed."""
    with reading(file):
        number: int = validate(_Format, content, is_json=True)["format"]
        expected = " or ".join(map(str, READABLE))
        if number in READABLE:
            return number
        if number < 1:
            raise FieldError("format", expected, number)
    is_newer = number > FORMAT
    kind = "a newer" if is_newer else "an older"
    fix = "update graphckpt" if is_newer else f"resume once with a version that writes format {READABLE[0]}"
    what = f"{file}: format: expected {expected}, got {number}, which {kind} version of graphckpt has written"
    raise FormatError(f"{what} · fix: {fix}, or start a run from the weights: train.load_weight={file.parent}")


class RunInfo(TypedDict):
    """``snapshot.json``."""

    format: int
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
    """The generators of one rank; NumPy does not check the position in its state."""

    cpu: InstanceOf[Tensor]
    devices: list[tuple[Text, InstanceOf[Tensor]]]
    numpy: tuple[Literal["MT19937"], list[_Uint32], Annotated[Count, Field(le=624)], Count, Number]
    python: tuple[Literal[3], tuple[_Uint32, ...], Number | None]


class _Settings(TypedDict):
    """The settings of the run, so that a resume sees what has changed."""

    seed: Annotated[int, Strict(), Field(ge=0, le=2**63)]
    optimizer: Text
    groups: list[dict[str, Any]]
    schedule: dict[str, Any]


class TrainerState(TypedDict):
    """``trainer.pt``."""

    random: _Random
    random_of_each: NotRequired[list[_Random]]
    pipeline_parallel_size: NotRequired[_Positive]
    settings: _Settings
    buffers: dict[str, InstanceOf[Tensor]]
    extra: dict[str, Any]
    hooks: dict[str, dict[str, Any]]


class _Group(TypedDict):
    params: list[Count]


class _OptimizerState(TypedDict):
    param_groups: list[_Group]
    state: dict[Count, dict[str, Any]]


_GraphState = TypedDict("_GraphState", {STEP: InstanceOf[Tensor], OPTIMIZER: _OptimizerState})  # type: ignore[misc]


# ---- compared with the run that reads it

_FREE = {"lr", "weight_decay", "dampening", "eps", "lr_decay", "maximize", "nesterov", "foreach", "fused", "capturable"}
"""Settings that say nothing of what an optimizer keeps."""
_FACTORED = {"row_var", "col_var"}  # of Adafactor: one dim of the parameter is missing


def check_trainer(
    trainer: Any,
    *,
    buffers: Mapping[str, Tensor],
    unsaved: Iterable[str],
    extra: Iterable[str],
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
    for name in (*trainer["buffers"], *unsaved):
        like, value = buffers.get(name), trainer["buffers"].get(name, _NOTHING)
        if like is None or value is _NOTHING or (value.dtype, value.ndim) != (like.dtype, like.ndim):
            raise FieldError(f"buffers.{name}", "nothing" if like is None else _shown(like), value)
    if trainer["extra"].keys() != (expected_extra := set(extra)):
        raise FieldError("extra", f"the entries {sorted(expected_extra)}", sorted(trainer["extra"]))


def check_graph(
    graph: Any, like: Mapping[str, Any], optimizer: Optimizer, *, done: int, num_states: int | None
) -> None:
    """Checks ``graph.pt`` against the state of the graph that it is for: groups, counts, and shapes."""
    validate(_GraphState, graph)
    names, saved = ([group["params"] for group in part[OPTIMIZER]["param_groups"]] for part in (like, graph))
    if [*map(len, names)] != [*map(len, saved)]:
        raise FieldError(f"{OPTIMIZER}.param_groups", f"groups of {[*map(len, names)]} parameters", [*map(len, saved)])
    if names != saved:
        raise FieldError(f"{OPTIMIZER}.param_groups", "the parameters in their order", saved)
    # A gradient scaler skips the update of an overflow, so that steps may be fewer than iterations.
    step, steps = graph[STEP], range(0 if _SCALER in graph else done, done + 1)
    if step.shape != () or step.dtype != torch.int64 or int(step) not in steps:
        raise FieldError(STEP, f"an int64 scalar from {steps[0]} to {done}", step)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = graph[OPTIMIZER]["state"]
    if num_states not in {None, len(states)} or not all(number < len(parameters) for number in states):
        raise FieldError(f"{OPTIMIZER}.state", f"the states of {num_states or len(parameters)} parameters", states)
    for number, entries in states.items() if type(optimizer).__module__.startswith("torch.optim") else ():
        size = list(parameters[number].shape)
        for name, value in entries.items():
            shape = list(value.shape) if isinstance(value, Tensor) else next(iter(extracted_shapes(value).values()), [])
            if shape and shape != size and name not in _FACTORED:
                raise FieldError(f"{OPTIMIZER}.state[{number}].{name}", f"a tensor of shape {size}", value)


def is_of_states(optimizer: Optimizer, key: str, before: Any, after: Any) -> bool:
    """Whether the states of an optimizer depend on a setting that has changed, so that they would not fit it.

    They have other entries if a setting such as ``amsgrad`` or ``momentum`` is turned on or off; two settings only say
    how they begin.

    >>> adam = torch.optim.Adam([torch.zeros(1)])
    >>> is_of_states(adam, "amsgrad", False, True), is_of_states(adam, "weight_decay", 0.0, 0.1)
    (True, False)
    """
    # Adagrad's sums begin at the first, Rprop's step sizes at its learning rate: both are in the states already.
    if key == "initial_accumulator_value" or (key == "lr" and isinstance(optimizer, torch.optim.Rprop)):
        return True
    is_set = None not in (before, after)  # not a key of another version, nor one that leaves the choice to PyTorch
    return is_set and key in optimizer.defaults and key not in _FREE and bool(before) != bool(after)
