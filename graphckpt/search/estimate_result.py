"""The figures of an estimate, and their table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, final

from rich.text import Text

from graphckpt.errors import ConfigError
from graphckpt.ledger.page import notebook_html
from graphckpt.ledger.table import Column, bullet, bytes_or_dash, show, table_of, text_of, time_of
from graphckpt.planning.intervals import Interval, Phase
from graphckpt.planning.measured_step import MeasuredStep
from graphckpt.search.trainer_lines import TrainingSetup, apply_line, check_policy_file, save_policies, trainer_lines
from graphckpt.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from graphckpt.planning.plan import Plan
    from graphckpt.simulation.profile import DeviceProfile


@final
@dataclass(frozen=True, kw_only=True)
class PeakParts:
    """The bytes alive at the peak of a step, which sum to it, and those that layers keep from forward to backward."""

    weights: int
    """Parameters and buffers."""
    gradients: int
    optimizer_states: int
    workspaces: int
    """Workspaces of cuBLAS."""
    layers: int
    """Bytes that layers keep for their backward."""
    other: int
    """Everything else: embedding, head and loss, the running layer, temporaries of the optimizer."""
    saved_by_layers: Mapping[str, int] = field(default_factory=dict)
    """Bytes that all layers of a list keep at the end of the forward of a micro-batch, by its name and their number."""

    @classmethod
    def of(cls, measured: MeasuredStep, plan: Plan) -> Self:
        """Returns the parts of a plan of ``measured`` under which the step has run."""
        stages = dict(zip(measured.model.calls.base, plan.stages, strict=True))
        interval, stage = max(stages.items(), key=lambda item: item[1].peak_bytes)
        activations = plan.peak_parts["activations"]
        # What no layer's forward allocates, such as the loss, is the same under each plan, so that it follows from the
        # run with every block recomputed: at the start of the interval 10 GiB are alive there, of which forwards of
        # layers have allocated 3, and 7 are others. If 15 are alive under this plan, layers keep 8.
        base = measured.model
        outside = base.calls.base[interval].start - base.of_blocks[interval]
        layers = min(activations, max(0, stage.start_bytes - outside))
        return cls(
            weights=plan.peak_parts["weights"],
            gradients=plan.peak_parts["gradients"],
            optimizer_states=plan.peak_parts["optimizer states"],
            workspaces=plan.peak_parts["workspaces"],
            layers=layers,
            other=activations - layers,
            saved_by_layers=_saved_by_layers(measured, {key: one.start_bytes for key, one in stages.items()}),
        )

    def to_dict(self) -> dict[str, int]:
        """Returns the bytes by kind; their sum is the peak."""
        kinds = ("weights", "gradients", "optimizer_states", "workspaces", "layers", "other")
        return {f"{kind}_bytes": getattr(self, kind) for kind in kinds}


def _saved_by_layers(measured: MeasuredStep, starts: Mapping[Interval, int]) -> dict[str, int]:
    """Returns the rise of the level over the forwards of each kind of layers, in the last micro-batch of the step."""
    calls_of: dict[str, list[int]] = {}
    for call in measured.model.calls.passes[-1]:
        block = measured.model.block_of_call[call]
        calls_of.setdefault(measured.names[block].rpartition(".")[0], []).append(call)
    saved = {}
    for place, calls in calls_of.items():
        rises = (starts[Interval(Phase.AFTER_FORWARD, c)] - starts[Interval(Phase.FORWARD, c)] for c in calls)
        saved[f"{place}.* ({len(calls)})"] = sum(rises)
    return saved


@final
@dataclass(frozen=True, kw_only=True)
class PolicyEstimate:
    """A training step under one choice of policies. Bytes are those at the peak of the step."""

    title: str
    """The heading of its column in the table."""
    allocated_bytes: int
    """The peak of the bytes of all tensors."""
    reserved_bytes: int
    """Bytes that PyTorch's caching allocator reserves; 0 if they are not known."""
    nvidia_smi_bytes: int
    """Bytes that ``nvidia-smi`` shows: reserved bytes, the CUDA context and the buffers of NCCL; 0 if not known."""
    seconds: float
    """The time of one step, from the rates of the device profile."""
    samples_per_second: float
    tokens_per_second: float | None
    """``None`` for images."""
    fits: bool
    """Whether the step fits into the memory of the device, with the CUDA context."""
    binding: str
    """The interval of the step that sets the peak."""
    parts: PeakParts
    """The allocated bytes by kind."""
    policies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The policies by block, as :func:`graphckpt.apply` takes them."""

    @classmethod
    def of(
        cls, plan: Plan, measured: MeasuredStep, machine: DeviceProfile, *, samples: int, tokens: int | None, title: str
    ) -> Self:
        """Returns the figures of a plan of ``measured`` under which the step has run."""
        seconds, allocated = plan.predicted_step_seconds, plan.predicted_peak_bytes
        total = plan.predicted_nvidia_smi_bytes or allocated
        rate = 1 / seconds if seconds else 0.0
        return cls(
            title=title,
            allocated_bytes=allocated,
            reserved_bytes=plan.predicted_reserved_bytes,
            nvidia_smi_bytes=plan.predicted_nvidia_smi_bytes,
            seconds=seconds,
            samples_per_second=samples * rate,
            tokens_per_second=None if tokens is None else tokens * rate,
            fits=total <= machine.memory_bytes,
            binding=plan.binding,
            parts=PeakParts.of(measured, plan),
            policies=plan.policies,
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        names = (
            "title", "allocated_bytes", "reserved_bytes", "nvidia_smi_bytes", "seconds", "samples_per_second",
            "tokens_per_second", "fits", "binding",
        )  # fmt: skip
        return {
            **{name: getattr(self, name) for name in names},
            "reserved_bytes": self.reserved_bytes or None,
            "nvidia_smi_bytes": self.nvidia_smi_bytes or None,
            "parts": self.parts.to_dict(),
            "saved_by_layers": dict(self.parts.saved_by_layers),
            "policies": {name: dict(fields) for name, fields in self.policies.items()},
        }


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Estimate:
    """The memory and the time of a training step, as :func:`graphckpt.estimate` returns them. It prints as a table."""

    model: str
    """The name of the model."""
    architecture: str
    """Its class in Transformers."""
    task: str
    device: str
    memory_bytes: int
    """The memory of the device."""
    batch: int
    seq: int | None
    """Tokens of a sample; ``None`` for images."""
    num_parameters: int
    """Parameters of all ranks."""
    num_trainable: int
    """Parameters that are trained: with LoRA those of its adapters."""
    weight_bytes: int
    """Parameters and buffers of a rank."""
    gradient_bytes: int
    """The gradients of all parameters that are trained."""
    optimizer_bytes: int
    """The states of the optimizer on the device."""
    policies: Mapping[str, PolicyEstimate]
    """``"keep"``, ``"full"`` and ``"plan"``; or ``"keep"`` and the given policy."""
    host_bytes: int = 0
    """The states of the optimizer on the host."""
    world_size: int = 1
    """The number of ranks that share the model; batch, bytes, and samples and tokens per second are those of one."""
    plan: Plan | None = field(default=None, compare=False)
    """The best plan, or if none fits the one with the lowest peak; ``None`` with ``policy=``."""
    devices: tuple[str, ...] = ()
    """The packaged profiles whose memory suffices for the least of the estimates, smallest first."""
    other_devices: tuple[str, ...] = ()
    """Those whose memory suffices too, but whose kernels of attention are others, which may take other bytes."""
    assumptions: tuple[str, ...] = ()
    """The assumptions about the step."""
    notes: tuple[str, ...] = ()
    """Notes on the figures."""
    setup: TrainingSetup | None = field(default=None, repr=False, compare=False)
    """What a program has to say to train like this."""

    @property
    def apply_line(self) -> str:
        """The line of Python that sets the policies of the last column; a comment if it keeps everything."""
        return apply_line(self._last.policies, () if self.setup is None else self.setup.layers)

    @property
    def _last(self) -> PolicyEstimate:
        *_, last = self.policies.values()
        return last

    def lines(self, trainer: str) -> str:
        """Returns the lines of Python that train like this, under the policies of the last column.

        They use ``dataset``, which is the reader's.

        Args:
            trainer: ``"torch"``, ``"transformers"``, ``"trl"`` or ``"lightning"``.

        Raises:
            ConfigError: It is another one, or cannot train this model.
        """
        assert self.setup is not None
        return trainer_lines(self.setup, self._last.policies, trainer)

    def save(self, path: str | Path) -> None:
        """Writes the policies of the last column to a YAML file, for ``graphckpt.apply(model, path)``.

        Raises:
            ConfigError: Its name does not end in ``.yaml`` or ``.yml``, or it cannot be written.
        """
        check_policy_file(path)
        if self.plan is None:
            save_policies(self._last.policies, path)
        else:
            self.plan.save(path)

    def __str__(self) -> str:
        """Returns the figures as a table, in plain text."""
        return text_of(_parts_of(self)).rstrip("\n")

    def __repr__(self) -> str:
        """Returns one line."""
        peaks = ", ".join(f"{name} {format_bytes(one.allocated_bytes)}" for name, one in self.policies.items())
        return f"<Estimate of {self.model} on {self.device}: {peaks}>"

    def _repr_html_(self) -> str:
        return notebook_html(_parts_of(self), self._draw)

    def _draw(self, target: Path) -> None:
        if self.plan is None:
            raise ConfigError("Estimate: one policy has no plan to draw · fix: leave `policy` out")
        self.plan.plot(target)

    def explain(self, *, show_table: bool = True) -> Self:
        """Prints the table unless ``show_table`` is false; returns the estimate."""
        if show_table:
            show(_parts_of(self))
        return self

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, as ``graphckpt estimate --json`` prints them."""
        names = (
            "model", "architecture", "task", "device", "memory_bytes", "batch", "seq", "num_parameters",
            "num_trainable", "world_size", "weight_bytes", "gradient_bytes", "optimizer_bytes", "host_bytes",
        )  # fmt: skip
        return {
            **{name: getattr(self, name) for name in names},
            "policies": {name: policy.to_dict() for name, policy in self.policies.items()},
            "devices": list(self.devices),
            "other_devices": list(self.other_devices),
            "assumptions": list(self.assumptions),
            "notes": list(self.notes),
            "apply": self.apply_line,
        }


_MOST_DEVICES = 6  # in a line


def _first_of(devices: Sequence[str]) -> str:
    """Returns the names of the smallest devices, and how many others there are."""
    num_others = len(devices) - _MOST_DEVICES
    more = f" and {num_others} with more memory" if num_others > 0 else ""
    return ", ".join(devices[:_MOST_DEVICES]) + more


def _grouped(number: float) -> str:
    """Returns a number with its digits in groups of three.

    >>> _grouped(8030261248), _grouped(7539.4)
    ('8 030 261 248', '7 539')
    """
    return f"{number:,.0f}".replace(",", " ")


def _parts_of(estimate: Estimate) -> Iterator[RenderableType]:
    size = f"{_grouped(estimate.num_parameters)} parameters"
    if estimate.num_trainable != estimate.num_parameters:
        size += f", {_grouped(estimate.num_trainable)} of them trained"
    step = f"batch {estimate.batch}" + (f" x {estimate.seq} tokens" if estimate.seq else " images")
    yield Text(f"{estimate.model} ({estimate.architecture}, {size})")
    memory = "" if " of " in estimate.device else f" of {format_bytes(estimate.memory_bytes)}"
    rank = f", one rank of {estimate.world_size}" if estimate.world_size > 1 else ""
    yield Text(f"{step} on {estimate.device}{memory} (simulated{rank})")
    policies = list(estimate.policies.values())
    columns = [Column(""), *(Column(policy.title, is_number=True) for policy in policies)]
    yield table_of(columns, [[name, *cells] for name, cells in _rows(estimate, policies)])
    for policy in policies:
        yield Text(f"{policy.title}: peak reached {time_of(policy.binding)}")
    if estimate.devices:
        total = format_bytes(min(policy.nvidia_smi_bytes or policy.allocated_bytes for policy in policies))
        yield Text(f"the least of these, {total}, fits on: {_first_of(estimate.devices)}")
    if estimate.other_devices:
        yield Text(f"enough memory, but other kernels of attention: {_first_of(estimate.other_devices)}")
    yield estimate.apply_line
    for note in estimate.notes:
        yield bullet(note, "*")
    yield bullet(f"assumptions: {'; '.join(estimate.assumptions)}", "*")


def _rows(estimate: Estimate, policies: list[PolicyEstimate]) -> Iterator[tuple[str, list[str]]]:
    parts = [policy.parts for policy in policies]
    yield "weights", [format_bytes(one.weights) for one in parts]
    gradients = format_bytes(estimate.gradient_bytes)
    yield f"gradients (of {gradients})", [bytes_or_dash(one.gradients) for one in parts]
    host = f" (and {format_bytes(estimate.host_bytes)} on the host)" if estimate.host_bytes else ""
    yield f"optimizer states{host}", [bytes_or_dash(one.optimizer_states) for one in parts]
    yield "layers, for backward", [bytes_or_dash(one.layers) for one in parts]
    yield "other: head, loss, temporaries", [bytes_or_dash(one.other) for one in parts]
    if any(one.workspaces for one in parts):
        yield "workspaces of cuBLAS", [bytes_or_dash(one.workspaces) for one in parts]
    yield "allocated", [format_bytes(policy.allocated_bytes) for policy in policies]
    yield "reserved", [bytes_or_dash(policy.reserved_bytes) for policy in policies]
    yield "nvidia-smi", [bytes_or_dash(policy.nvidia_smi_bytes) for policy in policies]
    yield "fits", ["yes" if policy.fits else "no" for policy in policies]
    yield "step", [format_seconds(policy.seconds) for policy in policies]
    each = " of a rank" if estimate.world_size > 1 else ""
    if estimate.seq is None:
        yield f"samples/s{each}", [f"{policy.samples_per_second:.3g}" for policy in policies]
    else:
        yield f"tokens/s{each}", [_grouped(policy.tokens_per_second or 0) for policy in policies]
    for place in policies[0].parts.saved_by_layers:
        yield f"saved by {place}", [bytes_or_dash(one.saved_by_layers[place]) for one in parts]
