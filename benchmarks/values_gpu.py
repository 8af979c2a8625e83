"""Measures how much a recomputation differs by itself on a CUDA device: the tolerances of the value check.

Each model trains for a few steps under ``full`` with every value compared, in each dtype. A row has the number of
tensors that were compared, how many of them differed in any bit, and the largest difference beside its tolerance; the
times are those of steps that compare nothing, and every value.

    python benchmarks/values_gpu.py [--steps 8] [--minutes 3] [--out FOLDER] [--name NAME]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, Self

import torch
from device import device_for
from jobs import Jobs, answer, arguments
from report import header, table, write
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import graphckpt
from graphckpt.engine import values
from graphckpt.engine.values import tolerance_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Scatters(nn.Module):
    """Ops that add with atomics on CUDA, in an order of their own in each run."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(512, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x.detach().float().abs() * 97).long().sum(-1) % 512
        x = x + self.embedding(ids)
        summed = torch.zeros(64, x.shape[-1], dtype=x.dtype, device=x.device).index_add(0, ids % 64, x)
        counts = torch.zeros(64, device=x.device).scatter_add(0, ids % 64, torch.ones(len(ids), device=x.device))
        return torch.tanh(self.linear(summed[ids % 64] / counts[ids % 64, None].to(x.dtype)))


class Convolutions(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.second = nn.ConvTranspose2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.gelu(self.norm(self.first(x))))


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(x)[0]


def gpt2(dtype: torch.dtype, *, is_dry: bool) -> tuple[nn.Module, str, Callable[[nn.Module], Tensor]]:
    width, tokens = (64, 32) if is_dry else (768, 1024)
    config = GPT2Config(n_embd=width, n_layer=2 if is_dry else 12, n_head=4, use_cache=False, loss_type="ForCausalLM")
    ids = torch.randint(0, 50257, (1 if is_dry else 4, tokens), device=DEVICE)
    model = GPT2LMHeadModel(config).to(DEVICE, dtype).train()
    return model, "transformer.h.*", lambda model: model(ids, labels=ids).loss


def stack(
    block: Callable[[int], nn.Module], shape: Callable[[int], tuple[int, ...]]
) -> Callable[..., tuple[nn.Module, str, Callable[[nn.Module], Tensor]]]:
    def make(dtype: torch.dtype, *, is_dry: bool) -> tuple[nn.Module, str, Callable[[nn.Module], Tensor]]:
        width = 16 if is_dry else 256
        model = nn.Sequential(*(block(width) for _ in range(4))).to(DEVICE, dtype)
        x = torch.randn(shape(width), device=DEVICE, dtype=dtype)
        return model, "*", lambda model: model(x).float().square().mean()

    return make


MODELS: dict[str, Callable[..., tuple[nn.Module, str, Callable[[nn.Module], Tensor]]]] = {
    "GPT-2": gpt2,
    "attention": stack(
        lambda width: nn.TransformerEncoderLayer(width, 8, batch_first=True), lambda width: (4, width, width)
    ),
    "atomics": stack(Scatters, lambda width: (16 * width, width)),
    "convolutions": stack(Convolutions, lambda width: (4, width, 32, 32)),
    "LSTM": stack(Recurrent, lambda width: (8, width // 2, width)),
}


class Differences:
    """What is compared while it is active, with the differences of all pairs: it waits for the device."""

    def __init__(self) -> None:
        self.by_dtype: dict[torch.dtype, list[float]] = {}

    def __enter__(self) -> Self:
        self._compare = compare = values.Comparison._compare

        def note(own: values.Comparison, position: int, original: values.Sketch, tensor: Tensor) -> None:
            sketch = values.sketch_of(tensor, original.reading)
            if sketch is not None:
                pair = values._Pair(position, (tensor.dtype, tensor.shape), original.values, sketch.values)
                self.by_dtype.setdefault(tensor.dtype, []).append(values.relative_differences([pair]).item())
            compare(own, position, original, tensor)

        values.Comparison._compare = note  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        values.Comparison._compare = self._compare  # type: ignore[method-assign]


def seconds_of(step: Callable[[], None], count: int) -> float:
    step()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    begin = perf_counter()
    for _ in range(count):
        step()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return (perf_counter() - begin) / count


def rows_of(name: str, dtype: str, steps: int, *, is_dry: bool) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    model, blocks, loss = MODELS[name](DTYPES[dtype], is_dry=is_dry)

    def step() -> None:
        model.zero_grad()
        loss(model).backward()

    seconds = {}
    for check in ("none", "values"):
        with graphckpt.apply(model, {blocks: True}, determinism_check=check):
            seconds[check] = seconds_of(step, steps)
    with graphckpt.apply(model, {blocks: True}, determinism_check="values"), Differences() as differences:
        for _ in range(steps):
            step()
    for kind, found in differences.by_dtype.items():
        yield {
            "model": name,
            "in": dtype,
            "dtype": str(kind).removeprefix("torch."),
            "compared": len(found),
            "unequal": sum(each > 0 for each in found),
            "largest": max(found),
            "tolerance": tolerance_of(kind),
            **{f"seconds_{check}": value for check, value in seconds.items()},
        }


def main() -> None:
    """Measures all and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    arguments(parser, 3)
    options = parser.parse_args()
    steps = 2 if options.dry_run else options.steps
    if options.job:
        answer(rows_of(*options.job["of"], steps, is_dry=options.dry_run))
        return
    device = device_for(is_dry=options.dry_run)
    jobs = Jobs(__file__, options, header(**device.header(), steps=steps))
    for name in MODELS:
        for dtype in DTYPES:
            # In a dry run kernels are those of the CPU, which have fewer types; a simulated device has no LSTM.
            is_left_out = (
                (name == "LSTM" and DEVICE.type == "cuda")
                or (name == "convolutions" and dtype != "float32")
                or (dtype == "float16" and DEVICE.type == "cpu")
            )
            if not (options.dry_run and is_left_out):
                jobs.run({"of": [name, dtype]})
    cells = [
        [
            row["model"], row["in"], row["dtype"], str(row["compared"]), str(row["unequal"]), f"{row['largest']:.1e}",
            f"{row['tolerance']:.0e}", f"{row['seconds_values'] / row['seconds_none']:.3f}",
        ]
        for row in jobs.rows
        if "largest" in row
    ]  # fmt: skip
    titles = ["model", "in", "tensors of", "compared", "unequal", "largest difference", "tolerance", "values / none"]
    write(jobs.name, jobs.head, jobs.rows, table(titles, cells), options.out)


if __name__ == "__main__":
    main()
