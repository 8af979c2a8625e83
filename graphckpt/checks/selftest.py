"""The checks of ``graphckpt selftest``, each of which yields rows as it goes, and the text that reports them."""

from __future__ import annotations

import gc
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import inf
from typing import Any, final

import torch
from torch import Tensor, nn

from graphckpt.blocks.apply import apply
from graphckpt.blocks.config import fields_of
from graphckpt.blocks.hooks import ModuleHook
from graphckpt.checks.subjects import LARGER, RULES, STORES, SUBJECTS, Subject, Training
from graphckpt.checks.verify import verify
from graphckpt.errors import GraphError, first_line
from graphckpt.ledger.table import Column, table_of, text_of
from graphckpt.planning.plan import Plan
from graphckpt.planning.plan_step import plan
from graphckpt.rules import Tiles
from graphckpt.simulation.write_profile import copy_rates
from graphckpt.units import format_bytes, format_sizes

EQUAL, CLOSE, MEASURED, SKIPPED = "equal", "close", "measured", "skipped"
DIFFERS, ERROR = "differs", "error"
# The first step creates optimizer states, and blocks learn in it which state changes.
_STEPS = 2
# Times the difference between two plain steps is as much as a step under policies may differ.
_NOISE = 8
# Of the largest value: where sums are in another order.
_ROUNDING = 1e-4
# Of the measured bytes. Segments are 2 to 20 MiB, so that a small model reserves in coarse steps.
_OFF_BY = {"allocated": 0.01, "reserved": 0.1}
_TRANSFORMER = SUBJECTS[1]
_LOAD = 16 * 2**20  # bytes of a copy next to the step
_SHARE = 0.7  # of the bytes of the plain step, for a plan


@final
@dataclass(frozen=True, slots=True)
class CheckResult:
    """One result."""

    check: str
    subject: str
    store: str
    outcome: str
    """``"equal"`` in every bit, ``"close"`` up to rounding, ``measured``, ``skipped``, ``differs`` or ``error``."""
    detail: str = ""

    @property
    def is_fault(self) -> bool:
        return self.outcome in (DIFFERS, ERROR)

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def machine(device: torch.device) -> str:
    """Returns a line about the machine, for an issue."""
    cuda = f", CUDA {torch.version.cuda}" if torch.version.cuda else ""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    host = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    return f"torch {torch.__version__}{cuda}, {host}; {device}: {name}"


def run(device: torch.device, graph: Any, begin: Callable[[str], object] = str) -> Iterator[CheckResult]:
    """Runs all checks.

    Args:
        device: Where the steps run.
        graph: The class :class:`graphckpt.Graph`, which is above this package: its ``verify`` is of this package.
        begin: Called with the name of each check that begins.
    """
    noise: dict[str, float] = {}
    for subject in SUBJECTS:
        begin(subject.name)
        # First: where a plain step differs from itself, policies are compared by tolerance; where it fails, not at all.
        row = _guarded(partial(_plain_twice, subject, device, noise), "plain step, twice", subject.name, "device")
        yield row
        if row.outcome == ERROR:
            continue
        for rule, policies in RULES.items():
            for store, fields in STORES.items():
                if rule == "keep" and not fields:
                    continue  # the plain step
                check = partial(_policies, subject, device, policies, fields, noise)
                yield _guarded(check, rule, subject.name, store)
        if subject.tiles:
            yield _guarded(partial(_tiles, subject, device), "tiles(4)", subject.name, "device")
    checks: tuple[tuple[str, Callable[[torch.device], tuple[str, str]]], ...] = (
        ("captured step", partial(_captured, graph=graph)),
        ("offload under load", _under_load),
        ("allocated bytes", partial(_predicted, kind="allocated")),
        ("reserved bytes", partial(_predicted, kind="reserved")),
        ("copies to host", partial(_rates, tier="host")),
        ("copies to disk", partial(_rates, tier="disk")),
    )
    for name, check_on in checks:
        begin(name)
        yield _guarded(partial(check_on, device), name, "transformer", "device")


def _guarded(check: Callable[[], tuple[str, str]], name: str, subject: str, store: str) -> CheckResult:
    """Runs one check: an error is its result, and the next one runs."""
    try:
        outcome, detail = check()
    # A device may raise anything, and the report is wanted most where it does.
    except Exception as error:
        outcome, detail = ERROR, f"{type(error).__name__}: {first_line(error)}"
    return CheckResult(name, subject, store, outcome, detail)


def _plain_twice(subject: Subject, device: torch.device, noise: dict[str, float]) -> tuple[str, str]:
    one, other = (_traced(subject.train(device)) for _ in range(2))
    different = [name for name in one if not torch.equal(one[name], other[name])]
    noise[subject.name] = max(_distances(one, other).values())
    if not different:
        return EQUAL, ""
    return CLOSE, f"the plain step differs from itself: {', '.join(different[:3])}; it is compared by tolerance"


def _traced(training: Training) -> dict[str, Tensor]:
    """Runs a step; returns the inputs and outputs of its modules, in the order of their calls, and its results."""
    # Of the modules as well, so that the first of them that differs names the op that varies.
    outputs: dict[str, Tensor] = {}

    def see(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        kind = f"{name} ({type(module).__name__})"
        outputs[f"what {kind} gets"] = inputs[0].detach().clone()
        outputs[f"what {kind} returns"] = output.detach().clone()

    for name, module in training.model.named_modules():
        if not any(module.children()):
            module.register_forward_hook(ModuleHook(partial(see, name)))
    results = _results(training)
    return {**outputs, **results}


def _results(training: Training) -> dict[str, Tensor]:
    """Runs a forward and a backward; returns the loss and all gradients."""
    results = {"loss": training.forward_backward().detach()}
    for name, parameter in training.model.named_parameters():
        if parameter.grad is not None:
            results[f"gradient of {name}"] = parameter.grad
    return results


def _distances(results: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the largest difference of each tensor, relative to the largest value of all."""
    scale = max(float(value.double().abs().max()) for value in expected.values())
    return {
        name: float((results[name].double() - value.double()).abs().max()) / scale
        for name, value in expected.items()
        if name in results
    }


def _policies(
    subject: Subject,
    device: torch.device,
    policies: Mapping[str, Any],
    fields: Mapping[str, Any],
    noise: dict[str, float],
) -> tuple[str, str]:
    if "offload" in fields and fields["offload"] is True and device.type == "cpu":
        return SKIPPED, "the tensors are in host memory already"
    policies = {selector: {**fields_of(policy), **fields} for selector, policy in policies.items()}
    if noise[subject.name]:
        return _compared(subject, device, policies, _NOISE * noise[subject.name])
    training = subject.train(device)
    try:
        verify(training.model, training.step, policies, steps=_STEPS, show=False)
    except GraphError as error:
        return DIFFERS, str(error).removeprefix("verify: ")
    return EQUAL, ""


def _tiles(subject: Subject, device: torch.device) -> tuple[str, str]:
    return _compared(subject, device, {subject.tiles: Tiles(4)}, _ROUNDING)


def _compared(subject: Subject, device: torch.device, policies: Mapping[str, Any], tolerance: float) -> tuple[str, str]:
    """Compares a step with the plain one by tolerance."""
    expected, training = _results(subject.train(device)), subject.train(device)
    with apply(training.model, policies):
        distances = _distances(_results(training), expected)
    for name in expected:
        if not (distance := distances.get(name, inf)) <= tolerance:
            return DIFFERS, f"`{name}` differs by {distance:.2g} of the largest value, expected at most {tolerance:.2g}"
    return CLOSE, ""


def _captured(device: torch.device, graph: Any) -> tuple[str, str]:
    """Compares replays of a step of a ``graph``, a class, with plain steps."""
    if device.type != "cuda":
        return SKIPPED, "steps are captured on CUDA alone"
    training = _TRANSFORMER.train(device, fused=True, capturable=True)

    class Train(graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = training.model
            layers: Any = self.model.layers  # blocks
            for layer in layers:
                layer.config.update({"activation_checkpointing": True, "offload": True, "min_elements": 1})
            self.add_optimizer(training.optimizer)
            self.config.capture = "cuda_graph"

        def build(self, batch: Tensor) -> Tensor:
            loss: Tensor = self.model(batch).square().mean()
            loss.backward()
            return loss

    try:
        result = Train().verify(training.batch)
    except GraphError as error:
        return DIFFERS, str(error)
    return (EQUAL if result.is_captured else DIFFERS), str(result)


def _under_load(device: torch.device) -> tuple[str, str]:
    """Offloads while other streams copy to and from pinned memory, and multiply."""
    if device.type != "cuda":
        return SKIPPED, "there are no streams on a CPU"
    training, side = _TRANSFORMER.train(device), torch.cuda.Stream(device)
    pinned = torch.empty(_LOAD, dtype=torch.uint8, pin_memory=True)
    there, factor = torch.empty(_LOAD, dtype=torch.uint8, device=device), torch.ones(512, 512, device=device)

    # A copy that is waited for too late, or not at all, shows only where the device is busy.
    def step() -> Tensor:
        with torch.cuda.stream(side):
            for _ in range(4):
                there.copy_(pinned, non_blocking=True)
                factor @ factor
                pinned.copy_(there, non_blocking=True)
        return training.step()

    fields = {"activation_checkpointing": True, "offload": True, "min_elements": 1}
    try:
        verify(training.model, step, {"layers.*": fields}, show=False)
    except GraphError as error:
        return DIFFERS, str(error)
    finally:
        side.synchronize()  # its memory is freed with this frame
    return EQUAL, ""


def _predicted(device: torch.device, kind: str) -> tuple[str, str]:
    """Compares the predicted peak of a planned step with the measured one."""
    if kind == "reserved" and device.type != "cuda":
        return SKIPPED, "a CPU has no caching allocator"
    training = (LARGER if kind == "reserved" else _TRANSFORMER).train(device)
    # Creates optimizer states. Tensors of others in this process that go meanwhile would look like those of the step.
    training.step()
    gc.collect()
    planned = plan(training.model, training.step, memory_budget=_budget(training), progress=False, group=False)
    if kind == "reserved":
        predicted, measured = planned.predicted_reserved_bytes, _reserved(training, planned)
    else:
        predicted, measured = planned.predicted_peak_bytes, planned.measured_peak_bytes or _peak(training, planned)
    is_near = abs(predicted - measured) <= _OFF_BY[kind] * measured
    sizes = "predicted {}, measured {}".format(*format_sizes(predicted, measured))
    return (DIFFERS if not is_near else EQUAL if predicted == measured else CLOSE), sizes


def _budget(training: Training) -> int | float:
    """Returns a budget that some layers exceed if they keep everything."""
    device = training.batch.device
    if device.type != "cuda":
        return _SHARE
    # A share of what the step adds: the allocator's peak includes the memory of others in this process.
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    training.step()
    return before + int(_SHARE * (torch.cuda.max_memory_allocated(device) - before))


def _peak(training: Training, planned: Plan) -> int:
    with planned.apply() as handle:
        with handle.measure():
            training.step()
        peak: int = handle.explain(show=False).peak_bytes
        return peak


def _reserved(training: Training, planned: Plan) -> int:
    device = training.batch.device  # which need not be the current one
    with planned.apply():
        gc.collect()
        torch.cuda.empty_cache()
        training.step()
        torch.cuda.reset_peak_memory_stats(device)
        training.step()
        return torch.cuda.max_memory_reserved(device)


def _rates(device: torch.device, tier: str) -> tuple[str, str]:
    if tier == "host" and device.type == "cpu":
        return SKIPPED, "the tensors are in host memory already"
    there, back = copy_rates(device, tier)
    return MEASURED, f"{format_bytes(int(there))}/s there, {format_bytes(int(back))}/s back"


def report(machine: str, rows: Sequence[CheckResult], seconds: float) -> str:
    """Returns a text to read, and to paste into an issue."""
    faults = [row for row in rows if row.is_fault]
    num_checks = sum(row.outcome != SKIPPED for row in rows)
    verdict = f"{len(faults)} of {num_checks} checks failed" if faults else f"all {num_checks} checks passed"
    parts = [machine, _table(rows), *_others(rows), f"{verdict}, {seconds:.0f} s"]
    if faults:
        parts.append("please open an issue with this text")
    return "\n".join(parts)


def _table(rows: Sequence[CheckResult]) -> str:
    """Returns a table of the rules by stores: over all models, each cell has the outcomes that differ."""
    cells: dict[tuple[str, str], list[CheckResult]] = {}
    for row in rows:
        cells.setdefault((row.check, row.store), []).append(row)
    lines = [[rule, *(_cell(cells.get((rule, store), [])) for store in STORES)] for rule in RULES]
    return text_of([table_of([Column("policy"), *map(Column, STORES)], lines)]).rstrip()


def _cell(rows: Sequence[CheckResult]) -> str:
    outcomes = dict.fromkeys(row.outcome for row in rows)
    faults = sum(row.is_fault for row in rows)
    if faults:
        return f"FAILED {faults} of {len(rows)}"
    return ", ".join(outcomes) or "-"


def _others(rows: Sequence[CheckResult]) -> Iterator[str]:
    for row in rows:
        if row.check not in RULES:
            subject = f", {row.subject}" if row.outcome != SKIPPED else ""
            detail = f": {row.detail}" if row.detail else ""
            yield f"{row.check}{subject}: {row.outcome}{detail}"
    for row in rows:
        if row.check in RULES and (row.is_fault or (row.detail and row.outcome not in (EQUAL, CLOSE, SKIPPED))):
            yield f"FAILED: {row.check}, {row.store}, {row.subject}: {row.detail}"
