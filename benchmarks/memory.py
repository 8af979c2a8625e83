"""Measures peak memory and time of forward and backward of real models, under every rule and its peers.

Each variant of each repeat runs in a process of its own: it builds the model (random weights), runs one
step to warm up and some to time, reads the largest resident set, and then runs one step more under
``LiveBytes``, which counts tensor bytes exactly. No optimizer: its state is the same in all variants.

    python benchmarks/memory.py [--models gpt2 bert-large] [--batch 4 128] [--repeats 3] [--steps 2]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from report import header, spread, table, write
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import graphckpt
from graphckpt.ledger.live_memory import LiveBytes
from graphckpt.rules import Segments, Selective, Tiles
from graphckpt.rules.selective import PRESETS

# Legend: B batch, T tokens, N batch times tokens, D width

# ---- the models, as people use them


def gpt2() -> nn.Module:
    """GPT-2 of 124 million parameters, dropout 0.1."""
    return GPT2LMHeadModel(GPT2Config(use_cache=False, loss_type="ForCausalLM"))


def bert_large() -> nn.Module:
    """BERT-large of 335 million parameters, dropout 0.1."""
    return BertForMaskedLM(
        BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    )


MODELS = {"gpt2": (gpt2, "transformer.h"), "bert-large": (bert_large, "bert.encoder.layer")}


class LossHead(nn.Module):
    """Logits and loss in one module, so that a rule can tile them."""

    def __init__(self, head: nn.Module, reduction: str) -> None:
        super().__init__()
        self.head = head
        self.reduction = reduction

    def forward(self, hidden_ND: Tensor, labels_N: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(hidden_ND), labels_N, reduction=self.reduction)


class InOrder(nn.Module):
    """The same model; one ``nn.Sequential`` calls its layers, and one module makes its loss."""

    def __init__(self, model: nn.Module, reduction: str = "mean") -> None:
        super().__init__()
        self.is_gpt = isinstance(model, GPT2LMHeadModel)
        self.model = model
        self.layers = nn.Sequential(*(model.transformer.h if self.is_gpt else model.bert.encoder.layer))
        self.loss_head = LossHead(model.lm_head if self.is_gpt else model.cls, reduction)
        self.torch_runs = 0

    def call_layers(self, hidden_BTD: Tensor) -> Tensor:
        if not self.torch_runs:
            return self.layers(hidden_BTD)
        return checkpoint_sequential(self.layers, self.torch_runs, hidden_BTD, use_reentrant=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        if self.is_gpt:
            gpt = self.model.transformer
            places = torch.arange(input_ids.shape[1])
            hidden_BTD = gpt.ln_f(self.call_layers(gpt.drop(gpt.wte(input_ids) + gpt.wpe(places))))
            labels = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)  # the next token; the last has none
        else:
            hidden_BTD = self.call_layers(self.model.bert.embeddings(input_ids))
        loss = self.loss_head(hidden_BTD.flatten(0, 1), labels.flatten())
        return loss if self.loss_head.reduction == "mean" else loss / (labels != -100).sum()


# ---- the variants: each takes the model and the path of its layers, and returns what is to be called


def plain(model: nn.Module, _layers: str) -> nn.Module:
    return model


def torch_checkpoint(model: nn.Module, layers: str) -> nn.Module:
    for layer in model.get_submodule(layers):  # type: ignore[attr-defined]
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return model


def torch_selective(model: nn.Module, layers: str, preset: str) -> nn.Module:
    contexts = partial(create_selective_checkpoint_contexts, list(PRESETS[preset]))
    for layer in model.get_submodule(layers):  # type: ignore[attr-defined]
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)
    return model


def torch_sequential(model: nn.Module, _layers: str, runs: int) -> nn.Module:
    outer = InOrder(model)
    outer.torch_runs = runs
    return outer


def transformers_own(model: nn.Module, _layers: str) -> nn.Module:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    return model


def fairscale(model: nn.Module, layers: str) -> nn.Module:
    from fairscale.nn import checkpoint_wrapper  # noqa: PLC0415 - only this variant needs it

    stack = model.get_submodule(layers)
    for at, layer in enumerate(stack):  # type: ignore[arg-type]
        stack[at] = checkpoint_wrapper(layer)  # type: ignore[operator]
    return model


def ours(model: nn.Module, layers: str, rule: Any) -> nn.Module:
    graphckpt.apply(model, {f"{layers}.*": {"activation_checkpointing": rule}})
    return model


def ours_in_order(model: nn.Module, _layers: str, rules: dict[str, Any]) -> nn.Module:
    outer = InOrder(model, reduction="sum" if "loss_head" in rules else "mean")
    graphckpt.apply(outer, {name: {"activation_checkpointing": rule} for name, rule in rules.items()})
    return outer


VARIANTS: dict[str, Callable[[nn.Module, str], nn.Module]] = {
    "plain": plain,
    "torch.utils.checkpoint": torch_checkpoint,
    "Transformers gradient_checkpointing_enable": transformers_own,
    "FairScale checkpoint_wrapper": fairscale,
    "graphckpt keep": partial(ours, rule=False),
    "graphckpt full": partial(ours, rule="full"),
    "torch selective, matmul": partial(torch_selective, preset="matmul"),
    "graphckpt selective(matmul)": partial(ours, rule=Selective(save="matmul")),
    "torch selective, attention": partial(torch_selective, preset="attention"),
    "graphckpt selective(attention)": partial(ours, rule=Selective(save="attention")),
    "torch selective, matmul+attention": partial(torch_selective, preset="matmul+attention"),
    "graphckpt selective(matmul+attention)": partial(ours, rule=Selective(save="matmul+attention")),
    "torch checkpoint_sequential, 4 runs": partial(torch_sequential, runs=4),
    "graphckpt segments(4)": partial(ours_in_order, rules={"layers": Segments(4)}),
    "graphckpt segments(sqrt)": partial(ours_in_order, rules={"layers": Segments("sqrt")}),
    "graphckpt segments(log)": partial(ours_in_order, rules={"layers": Segments("log")}),
    "graphckpt tiles(8) on the loss head": partial(ours_in_order, rules={"loss_head": Tiles(8, reduce="sum")}),
    "graphckpt full + tiles(8) on the loss head": partial(
        ours_in_order, rules={"layers.*": "full", "loss_head": Tiles(8, reduce="sum")}
    ),
}


# ---- one process


def measure(model_name: str, variant: str, shape: tuple[int, int], num_steps: int) -> dict[str, Any]:
    """Builds one variant and measures it, in a fresh process: the peak of the resident set never falls."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    build, layers = MODELS[model_name]
    torch.manual_seed(0)
    model = build()
    called = VARIANTS[variant](model, layers).train()
    ids = torch.randint(0, model.config.vocab_size, shape)
    labels = torch.randint(0, model.config.vocab_size, shape) if model_name != "gpt2" else ids
    parameters = list(model.parameters())

    def forward() -> Tensor:
        output = called(input_ids=ids, labels=labels)
        return output if isinstance(output, Tensor) else output.loss

    def backward(loss: Tensor) -> None:
        loss.backward()

    resident_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    torch.manual_seed(1)
    loss = forward()
    first_loss = loss.item()
    backward(loss)
    gradient = _digest(parameters)
    del loss
    seconds, cpu_seconds = [], []
    for _ in range(num_steps):
        model.zero_grad()
        begin, cpu_begin = perf_counter(), process_time()
        backward(forward())
        seconds.append(perf_counter() - begin)
        cpu_seconds.append(process_time() - cpu_begin)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    model.zero_grad()
    with LiveBytes(record_timeline=False) as live:
        live.track([*parameters, *model.buffers(), ids, labels])
        standing = live.live_bytes
        loss = forward()
        after_forward = live.live_bytes
        backward(loss)
    return {
        "model": model_name,
        "variant": variant,
        "loss": first_loss,
        "gradient": gradient,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "live_peak_bytes": live.peak_bytes,
        "kept_bytes": after_forward - standing,
        "parameter_bytes": standing,
        "rss_peak_bytes": resident,
        "rss_before_bytes": resident_before,
    }


def _digest(parameters: list[nn.Parameter]) -> int:
    """Names the bits of all gradients by one number."""
    return hash(tuple(p.grad.view(torch.int32).sum().item() for p in parameters if p.grad is not None))


# ---- all of them


def main() -> None:
    """Measures all and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--batch", nargs=2, type=int, default=[4, 128], metavar=("BATCH", "TOKENS"))
    parser.add_argument("--repeats", type=int, default=3, help="processes per variant, in turns")
    parser.add_argument("--steps", type=int, default=2, help="timed steps per process")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "VARIANT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        model, variant = options.one
        print(json.dumps(measure(model, variant, tuple(options.batch), options.steps)))
        return
    torch.set_num_threads(1)
    head = header(
        n=f"processes per variant (in turns): {options.repeats}; timed steps in each: {options.steps}",
        batch=f"{options.batch[0]} x {options.batch[1]} tokens, float32, dropout 0.1, forward and backward",
        live_peak="largest sum of all live tensor storages, parameters and gradients included",
        kept="what forward left alive for backward",
        rss_peak="largest resident set of the process, median",
        step="CPU seconds of one thread, median: a busy machine lengthens wall time, which is in the JSON, much more",
    )
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for turn in range(options.repeats):
        for model in options.models:
            for variant in options.variants:
                result = _in_a_process(model, variant, options)
                found[model, variant].append(result)
                print(
                    f"{turn + 1}/{options.repeats} {model}: {variant}: {_brief(result)}",
                    file=sys.stderr,
                    flush=True,
                )
    rows = [_row(model, variant, results) for (model, variant), results in found.items()]
    batch = "" if options.batch == [4, 128] else "_{}x{}".format(*options.batch)
    name = "memory" + ("" if options.models == list(MODELS) else "_" + "_".join(options.models)) + batch
    write(name, head, rows, "\n".join(_text(model, rows) for model in options.models))


def _in_a_process(model: str, variant: str, options: Any) -> dict[str, Any]:
    numbers = ["--steps", str(options.steps), "--batch", *map(str, options.batch)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, "--one", model, variant, *numbers],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"model": model, "variant": variant, "error": f"exit {done.returncode}: {last}"}
    return json.loads(done.stdout.strip().splitlines()[-1])  # type: ignore[no-any-return]


def _brief(result: dict[str, Any]) -> str:
    if "error" in result:
        return str(result["error"])
    return f"{result['live_peak_bytes'] / 2**20:.0f} MiB live, {min(result['cpu_seconds']):.2f} s of CPU"


def _row(model: str, variant: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    good = [result for result in results if "error" not in result]
    row: dict[str, Any] = {"model": model, "variant": variant, "n": len(good)}
    errors = [result["error"] for result in results if "error" in result]
    if errors:
        row["errors"] = errors
    if good:
        row |= {
            "live_peak_bytes": spread([result["live_peak_bytes"] for result in good]),
            "kept_bytes": spread([result["kept_bytes"] for result in good]),
            "rss_peak_bytes": spread([result["rss_peak_bytes"] for result in good]),
            "rss_before_bytes": spread([result["rss_before_bytes"] for result in good]),
            "parameter_bytes": good[0]["parameter_bytes"],
            "seconds": spread([value for result in good for value in result["seconds"]]),
            "cpu_seconds": spread([value for result in good for value in result["cpu_seconds"]]),
            "loss": good[0]["loss"],
            "gradient": good[0]["gradient"],
        }
    return row


def _text(model: str, rows: list[dict[str, Any]]) -> str:
    mine = [row for row in rows if row["model"] == model]
    base = next((row for row in mine if row["variant"] == "plain" and row["n"]), None)
    lines = []
    for row in mine:
        if not row["n"]:
            lines.append([row["variant"], "failed", "", "", "", "", ""])
            continue
        mib = {key: row[key]["median"] / 2**20 for key in ("live_peak_bytes", "kept_bytes", "rss_peak_bytes")}
        seconds = row["cpu_seconds"]["median"]
        bits = "" if base is None else "same" if row["gradient"] == base["gradient"] else "other"
        ratio = "" if base is None else f"{seconds / base['cpu_seconds']['median']:.2f}"
        lines.append([row["variant"], *(f"{value:.0f}" for value in mib.values()), f"{seconds:.2f}", ratio, bits])
    columns = ["variant", "live peak MiB", "kept MiB", "RSS peak MiB", "step CPU s", "x plain", "gradient bits"]
    errors = [f"- {row['variant']}: {row['errors'][0]}" for row in mine if "errors" in row]
    return "\n".join([f"## {model}", "", table(columns, lines), *(["", *errors] if errors else []), ""])


if __name__ == "__main__":
    main()
