"""Predicts steps whose memory and time others have measured and published, and writes both beside each other.

No number is fitted to these rows. Where a source ran other software than is installed here, its step is built as that
software ran it, with the names of the corrections in the row: see `OLD_SOFTWARE`. Times are by data sheet.

    python benchmarks/published.py [--rows WORD ...]

The row of torchtune needs its modules: `pip install --no-deps torchtune==0.4.0 torchao==0.7.0 sentencepiece tiktoken
blobfile`. Without them it says so.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from report import RESULTS, header, table, write
from titan import SELECTIVE, titan
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Adafactor, BertConfig, BertForSequenceClassification

import graphckpt
from graphckpt.planning.steps import FakeStep, made_step
from graphckpt.simulation.allocations import AllocationTrace
from graphckpt.simulation.cluster_profile import load_cluster
from graphckpt.simulation.fake_cluster import FakeCluster
from graphckpt.simulation.fake_device import FakeDevice
from graphckpt.simulation.profile import DeviceProfile, load_profile

# Legend: b samples, s tokens, h hidden, a heads

MIB = 2**20
TOLERANCE = 0.02  # of the bytes that a source reports
TIME_TOLERANCE = 0.10  # of rates that a source reports alone, and of the slowdown by `full`
Make = Callable[[], tuple[nn.Module, Callable[[], object]]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published figure, and what is predicted for it."""

    name: str
    source: str
    quantity: str
    """What the source reports: reserved, active or formula bytes, or "rate" alone."""
    published_bytes: float | None = None
    published_per_second: float | None = None
    unit: str = ""
    """What ``published_per_second`` counts."""
    corrections: str = ""
    """How the step differs from one that the installed software runs by default."""
    predicted_bytes: float | None = None
    allocated_bytes: float | None = None
    """The predicted peak of live bytes, where the source reports reserved ones."""
    with_new_softmax_bytes: float | None = None
    """Predicted with the softmax of today. The old one was looked for because these miss: see ``docs/published.md``."""
    predicted_per_second: float | None = None
    note: str = ""
    """Why there is no prediction, or why it differs."""

    @property
    def ratio(self) -> float | None:
        """Predicted by published: bytes, or rates where there are no bytes."""
        predicted, published = self.predicted_bytes, self.published_bytes
        if published is None:
            predicted, published = self.predicted_per_second, self.published_per_second
        return None if predicted is None or published is None else predicted / published

    @property
    def is_met(self) -> bool:
        tolerance = TIME_TOLERANCE if self.published_bytes is None else TOLERANCE
        return self.ratio is not None and abs(self.ratio - 1) <= tolerance


# ---- software of January 2022

OLD_SOFTWARE = (
    "eager attention, `zero_grad(set_to_none=False)`, AdamW in a loop over parameters, and the softmax of torch up to "
    "1.10, which saved its input beside its output. The trainer's clipping and gradient scaler, which work in place, "
    "are left out"
)


class _OldSoftmax(torch.autograd.Function):
    """The softmax of torch up to 1.10: `_softmax_backward_data` had the input among its arguments."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, dim: int) -> Tensor:
        weights = torch.softmax(scores, dim)
        ctx.save_for_backward(scores, weights)
        ctx.dim = dim
        return weights

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        _, weights = ctx.saved_tensors
        return torch.ops.aten._softmax_backward_data(gradient, weights, ctx.dim, weights.dtype), None


def _old_softmax(scores: Tensor, dim: int = -1, **_: Any) -> Tensor:
    if torch.is_autocast_enabled("cpu"):  # that of the simulated device: autocast runs a softmax in float32
        scores = scores.float()
    weights: Tensor = _OldSoftmax.apply(scores, dim)
    return weights


@contextmanager
def old_softmax() -> Iterator[None]:
    """Replaces ``F.softmax`` by that of torch up to 1.10."""
    original = F.softmax
    F.softmax = _old_softmax  # type: ignore[assignment]
    try:
        yield
    finally:
        F.softmax = original


def bert_2022(batch: int, accumulation: int, *, fp16: bool = False, adafactor: bool = False, **sizes: int) -> Make:
    """Returns the step of Transformers' benchmark: a classification by bert-large, 512 tokens a sample."""
    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}

    def make() -> tuple[nn.Module, Callable[[], object]]:
        config = BertConfig(**{**large, **sizes}, attn_implementation="eager")
        model = BertForSequenceClassification(config).to("cuda").train()
        if adafactor:
            optimizer: Any = Adafactor(model.parameters(), lr=5e-5, scale_parameter=False, relative_step=False)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, foreach=False)
        tokens = torch.ones(batch, 512, dtype=torch.long)
        labels = torch.zeros(batch, dtype=torch.long)

        def step() -> None:
            for _ in range(accumulation):
                with torch.autocast("cuda", torch.float16) if fp16 else nullcontext():
                    loss = model(input_ids=tokens, labels=labels).loss / accumulation
                loss.backward()
                del loss
            optimizer.step()
            model.zero_grad(set_to_none=False)

        return model, step

    return make


# ---- torchtune


def torchtune_llama(batch: int, tokens: int) -> Make:
    """Returns the step of torchtune 0.4.0's `full_finetune_single_device` on its Llama 3.2 3B, in pure bfloat16."""
    from torchtune.models.llama3_1 import _position_embeddings  # noqa: PLC0415 - an extra of this row
    from torchtune.models.llama3_2 import llama3_2_3b  # noqa: PLC0415

    def unscaled(self: object, freqs: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.empty_like(freqs)  # the original reads the values, which set no size

    def make() -> tuple[nn.Module, Callable[[], object]]:
        rope = _position_embeddings.Llama3ScaledRoPE
        original, rope.apply_scaling = rope.apply_scaling, unscaled
        try:
            with torch.device("cuda"):
                model = llama3_2_3b().to(torch.bfloat16)
        finally:
            rope.apply_scaling = original
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
        loss_fn = nn.CrossEntropyLoss(ignore_index=-100)
        inputs, labels = (torch.zeros(batch, tokens, dtype=torch.long) for _ in range(2))
        positions = torch.zeros(batch, tokens, dtype=torch.long)
        ignored = torch.full((batch, 1), -100)

        def step() -> None:
            logits = model(tokens=inputs, input_pos=positions)
            targets = torch.hstack((labels[..., 1:], ignored)).reshape(-1)
            logits = logits.reshape(-1, logits.size(-1))
            loss = loss_fn(logits, targets) * inputs.numel()
            del logits
            loss.backward()
            for parameter in model.parameters():  # `training.scale_grads`
                parameter.grad *= 1 / inputs.numel()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return model, step

    return make


# ---- Korthikanti et al.


class GPTBlock(nn.Module):
    """The block of Korthikanti et al. 2022, section 4.1, with dropout."""

    def __init__(self, hidden: int, heads: int, *, is_fused: bool) -> None:
        super().__init__()
        self.heads, self.is_fused = heads, is_fused
        self.norm, self.norm_mlp = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.project = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x_bsh: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x_bsh)).chunk(3, -1)
        )
        if self.is_fused:
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        else:
            weights = F.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1)
            mixed = F.dropout(weights, 0.1) @ v
        x_bsh = x_bsh + F.dropout(self.project(mixed.transpose(1, 2).flatten(2)), 0.1)
        return x_bsh + F.dropout(self.down(F.gelu(self.up(self.norm_mlp(x_bsh)))), 0.1)


def block_bytes(s: int, h: int, a: int, *, is_fused: bool, rule: object = None) -> int:
    """Returns the bytes that one block keeps for backward: what three keep less what two keep, without weights."""
    totals = []
    for num_blocks in (2, 3):
        device = FakeDevice(load_profile("a100-80g"))
        with device:
            model = nn.Sequential(*(GPTBlock(h, a, is_fused=is_fused) for _ in range(num_blocks))).half().to("cuda")
            x_bsh = torch.zeros(1, s, h, dtype=torch.float16, device="cuda", requires_grad=True)
        trace = AllocationTrace("meta", is_fake=True, rounded=device.machine.rounded)
        trace.track([*model.parameters(), x_bsh])
        with graphckpt.apply(model, {"*": rule}) if rule is not None else nullcontext(), device, trace:
            before = trace.live_bytes
            y = model(x_bsh)
            totals.append(trace.live_bytes - before)
            del y
    return totals[1] - totals[0]


# ---- the rows


@dataclass(frozen=True)
class Simulation:
    """The second step of a process on an absent device, and what its allocator reserves in the first steps."""

    peak_bytes: int
    reserved_bytes: int
    seconds: float


def simulate(
    make: Make,
    device: str | DeviceProfile,
    policies: Mapping[str, Any] | None = None,
    cluster: FakeCluster | None = None,
) -> Simulation:
    step, model = made_step(make, FakeDevice(load_profile(device), cluster=cluster), "published")
    assert isinstance(step, FakeStep)
    with graphckpt.apply(model, policies) if policies else nullcontext():
        run = step.run()
    assert run.allocations is not None
    replayed = step.replay(run.allocations)
    assert replayed is not None
    return Simulation(run.peak_bytes, replayed.reserved_bytes, run.seconds)


LAYERS = {"bert.encoder.layer.*": True}
_HF = 'Transformers\' page "performance", commit 0ad5fe67 of January 2022; V100 SXM2 16 GB, CUDA 11.2'
_CONTEXT_MIB = 1343  # which the page reports for one tensor


def _hf(name: str, mib: float, per_second: float, corrections: str = OLD_SOFTWARE, note: str = "") -> Row:
    return Row(
        name=f"bert-large, 512 tokens, {name}",
        source=_HF,
        quantity="reserved",
        published_bytes=(mib - _CONTEXT_MIB) * MIB,
        published_per_second=per_second,
        unit="samples",
        corrections=corrections,
        note=note,
    )


@dataclass(frozen=True)
class Job:
    row: Row
    run: Callable[[Row], Row]


def _bert(row: Row, policies: Mapping[str, Any] | None, batch: int, accumulation: int, **options: Any) -> Job:
    def run(row: Row) -> Row:
        make = bert_2022(batch, accumulation, **options)
        with old_softmax():
            found = simulate(make, "v100-16g", policies)
        return replace(
            row,
            predicted_bytes=found.reserved_bytes,
            allocated_bytes=found.peak_bytes,
            with_new_softmax_bytes=simulate(make, "v100-16g", policies).reserved_bytes,
            predicted_per_second=batch * accumulation / found.seconds,
        )

    return Job(row, run)


def _torchtune() -> Job:
    row = Row(
        name="Llama 3.2 3B, packed 2 x 4096, bfloat16, fused AdamW",
        source="README of torchtune 0.4.0, commit 1814feb17; A100 80 GB",
        quantity="active",
        published_bytes=60.0 * 2**30,
        published_per_second=7075,
        unit="tokens",
        corrections="flash attention in place of flex attention, which keeps the same tensors",
    )

    def run(row: Row) -> Row:
        try:
            number = version("torchtune")
        except PackageNotFoundError:
            return replace(row, note="not run: torchtune 0.4.0 is not installed")
        if number != "0.4.0":
            return replace(row, note=f"not run: torchtune {number} is installed, and its modules differ from 0.4.0's")
        try:
            make = torchtune_llama(2, 4096)
        except ImportError as error:
            return replace(row, note=f"not run: torchtune 0.4.0 cannot be imported: {str(error).splitlines()[0]}")
        found = simulate(make, "a100-80g")
        return replace(row, predicted_bytes=found.peak_bytes, predicted_per_second=2 * 4096 / found.seconds)

    return Job(row, run)


_TITAN = (
    'torchtitan\'s "benchmarks/llama3_h100_202412_torchtitan.md", commit 9dec370 of December 2024; H100 of 96 GB with '
    "2.4 TB/s and 500 W"
)
_OF_SELECTIVE = "PyTorch's selective checkpointing keeps the last product of each layer too, which no backward reads"
_OF_RATE = "the rate is not met: data sheets do not have the rates of an H100 limited to 500 W"


def _titan(ranks: int, gib: float, per_second: float) -> Job:
    row = Row(
        name=f"Llama 3.1 8B, FSDP2 over {ranks} ranks, 2 x 8192, selective",
        source=_TITAN,
        quantity="reserved",
        published_bytes=gib * 2**30,
        published_per_second=per_second,
        unit="tokens",
    )

    def run(row: Row) -> Row:
        machine = replace(load_profile("h100"), memory_bytes=95 * 2**30, memory_bandwidth=2.4e12)
        nodes = load_cluster("dgx-h100")
        with FakeCluster(ranks, profile=nodes) as cluster:
            theirs = simulate(lambda: titan("8B", 2, is_checkpointed=True), machine, cluster=cluster)
        with FakeCluster(ranks, profile=nodes) as cluster:
            ours = simulate(lambda: titan("8B", 2), machine, {"layers.*": SELECTIVE}, cluster)
        saved = (theirs.reserved_bytes - ours.reserved_bytes) / 2**30
        note = f"{_OF_RATE}. {_OF_SELECTIVE}: the rule `selective` takes {saved:.2f} GiB less"
        return replace(
            row,
            predicted_bytes=theirs.reserved_bytes,
            allocated_bytes=theirs.peak_bytes,
            predicted_per_second=2 * 8192 / theirs.seconds,
            note=note,
        )

    return Job(row, run)


_ASYNC_TP = (
    'torchtitan\'s "benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md", the rows without asynchronous tensor '
    "parallelism and quantization; H100 of 96 GB with 2.4 TB/s and 500 W"
)


def _titan_tp(size: str, ranks: int, batch: int, per_second: float, policies: Mapping[str, Any] | None) -> Job:
    policy = "selective" if policies is None else "full"
    row = Row(
        name=f"Llama 3.1 {size}, FSDP2 over {ranks // 8} x tensor parallelism over 8 ranks, {batch} x 8192, {policy}",
        source=_ASYNC_TP,
        quantity="rate",
        published_per_second=per_second,
        unit="tokens",
        corrections="eager, where the source compiles each layer",
    )

    def run(row: Row) -> Row:
        machine = replace(load_profile("h100"), memory_bytes=95 * 2**30, memory_bandwidth=2.4e12)
        with FakeCluster(ranks, profile=load_cluster("dgx-h100")) as cluster:
            found = simulate(
                lambda: titan(size, batch, is_checkpointed=policies is None, tensor_parallel=8),
                machine,
                policies,
                cluster,
            )
        return replace(row, allocated_bytes=found.peak_bytes, predicted_per_second=batch * 8192 / 8 / found.seconds)

    return Job(row, run)


SIZES = {  # s, h, a of "Reducing Activation Recomputation in Large Transformer Models", table 3, and a small one
    "GPT-2 medium": (1024, 1024, 16),
    "22B": (2048, 6144, 64),
    "175B": (2048, 12288, 96),
    "530B": (2048, 20480, 128),
    "1T": (2048, 25600, 160),
}


def _formula(size: str, kind: str) -> Job:
    s, h, a = SIZES[size]
    factor = {"eager": 34 + 5 * a * s / h, "flash": 34, "full": 2}[kind]
    text = {"eager": "sbh(34 + 5as/h)", "flash": "34sbh", "full": "2sbh"}[kind]
    row = Row(
        name=f"GPT block of {size}, {kind}: {text}",
        source="Korthikanti et al. 2022, table 2",
        quantity="formula",
        published_bytes=s * h * factor,
        note="flash attention keeps the log-sum-exp too, 4 bytes for each head and token" if kind == "flash" else "",
    )

    def run(row: Row) -> Row:
        rule = True if kind == "full" else None
        return replace(row, predicted_bytes=block_bytes(s, h, a, is_fused=kind == "flash", rule=rule))

    return Job(row, run)


_OF_ADAFACTOR = (
    "the rate is not met: Adafactor runs thousands of small ops in a loop over parameters, and the 5 us that the "
    "profile has for each are an assumption"
)


def jobs() -> list[Job]:
    without_adam = OLD_SOFTWARE.replace("AdamW in a loop over parameters", "Transformers' Adafactor")
    return [
        *(_formula(size, kind) for kind in ("eager", "flash", "full") for size in SIZES),
        _bert(_hf("fp32, batch 4", 14949, 8.86), None, 4, 1),
        _bert(_hf("fp32, batch 1 x 4", 8681, 7.75), None, 1, 4),
        _bert(_hf("fp32, batch 1 x 4, checkpointing", 6775, 5.99), LAYERS, 1, 4),
        _bert(
            _hf("fp16, batch 1 x 4, checkpointing, Adafactor", 4847, 9.06, without_adam, _OF_ADAFACTOR),
            LAYERS, 1, 4, fp16=True, adafactor=True,
        ),
        _torchtune(),
        _titan(8, 82.4, 5762),
        _titan(128, 67.0, 5605),
        _titan_tp("8B", 64, 12, 4378, None),
        _titan_tp("70B", 256, 16, 597.3, {"layers.*": True}),
    ]  # fmt: skip


# ---- the page


def text_of(rows: Sequence[Row]) -> str:
    cells = []
    for row in rows:
        is_rate = row.published_per_second is not None and row.predicted_per_second is not None
        rate = f"{row.published_per_second:g}" if row.published_per_second else "-"
        cells.append([
            row.name,
            row.quantity,
            "-" if row.published_bytes is None else f"{row.published_bytes / MIB:,.0f}",
            "-" if row.predicted_bytes is None else f"{row.predicted_bytes / MIB:,.0f}",
            "-" if row.ratio is None else f"{row.ratio:.4f}",
            "-" if row.allocated_bytes is None else f"{row.allocated_bytes / MIB:,.0f}",
            "-" if row.with_new_softmax_bytes is None else f"{row.with_new_softmax_bytes / MIB:,.0f}",
            rate,
            f"{row.predicted_per_second:.3g}" if is_rate else "-",
            f"{row.predicted_per_second / row.published_per_second:.2f}" if is_rate else "-",  # type: ignore[operator]
            "yes" if row.is_met else "no",
        ])  # fmt: skip
    columns = ["step", "bytes", "published MiB", "predicted MiB", "ratio", "allocated MiB", "today's softmax MiB"]
    columns += ["published per s", "predicted per s", "ratio of rates", "met"]
    lines = [table(columns, cells), ""]
    if (times := slowdown(rows)) is not None:
        published, predicted = times
        text = f"`full` slows the fp32 step of batch 1 x 4 down by {published - 1:.1%}; predicted {predicted - 1:.1%}, "
        lines += [f"{text}a ratio of {predicted / published:.3f} between the times.", ""]
    for title, name in (("Sources", "source"), ("Corrections", "corrections"), ("Notes", "note")):
        texts: dict[str, list[str]] = {}
        for row in rows:
            if getattr(row, name):
                texts.setdefault(getattr(row, name), []).append(row.name)
        if texts:
            lines += [f"## {title}", "", *(f"- {_listed(names)}: {text}." for text, names in texts.items()), ""]
    return "\n".join(lines)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def slowdown(rows: Sequence[Row]) -> tuple[float, float] | None:
    """Returns the time of the checkpointed fp32 step divided by that of the plain one: published, and predicted."""
    found = {row.name.rpartition("batch 1 x 4")[2]: row for row in rows if "fp32, batch 1 x 4" in row.name}
    plain, full = found.get(""), found.get(", checkpointing")
    if plain is None or full is None or not (plain.predicted_per_second and full.predicted_per_second):
        return None
    assert plain.published_per_second is not None
    assert full.published_per_second is not None
    return (
        plain.published_per_second / full.published_per_second,
        plain.predicted_per_second / full.predicted_per_second,
    )


def main(words: Sequence[str] | None = None, folder: Path = RESULTS) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=[""], metavar="WORD", help="only rows with one of these words")
    parser.add_argument("--add", action="store_true", help="keep the other rows of the results that there are")
    options = parser.parse_args(words)
    head = header(torchtune=_version_of("torchtune"))
    rows: list[Row] = []
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "published.jsonl"  # a run that is cut off has its rows there
    log.unlink(missing_ok=True)
    for job in jobs():
        if any(word in job.row.name for word in options.rows):
            begin = time.perf_counter()
            rows.append(job.run(job.row))
            with log.open("a") as file:
                file.write(json.dumps(asdict(rows[-1])) + "\n")
            print(
                f"{rows[-1].name}: {rows[-1].ratio} in {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True
            )
    if options.add:
        others = json.loads((folder / "published.json").read_text())["rows"]
        names = {field.name for field in fields(Row)}
        older = {row["name"]: Row(**{name: row[name] for name in names}) for row in others}
        newer = {row.name: row for row in rows}
        rows = [{**older, **newer}[job.row.name] for job in jobs() if job.row.name in {**older, **newer}]
    values = [{**asdict(row), "ratio": row.ratio, "is_met": row.is_met} for row in rows]
    write("published", head, values, text_of(rows), folder)
    return rows


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
