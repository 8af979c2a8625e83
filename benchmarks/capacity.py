"""Plans steps of real models for all the memory of a card, and finds the least memory with which the plan runs.

Each card has a share of what the allocator reserves with everything kept. Of its plan for `memory_budget="max"` the
table lists the predicted peak of allocated bytes, the least capacity in which the simulated allocator runs the first
steps without releasing segments after the second one, and the limit, which is the memory of the card without the
context. The limit must never be below the least capacity, and should not be over 2 % above it.

    python benchmarks/capacity.py [--steps WORD ...]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from report import header, table, write
from torch import nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from graphckpt.planning.options import PlanOptions
from graphckpt.planning.plan_group import PlanGroup
from graphckpt.planning.plan_step import find_blocks, plan_step
from graphckpt.planning.steps import FakeStep
from graphckpt.simulation.fake_device import FakeDevice
from graphckpt.simulation.profile import DeviceProfile, load_profile

MIB = 2**20
Make = Callable[[], tuple[nn.Module, Callable[[], object]]]


def language(
    kind: Any,
    config: Any,
    batch: int,
    length: int,
    *,
    micro_batches: int = 1,
    lora: bool = False,
    autocast: bool = True,
) -> Make:
    def make() -> tuple[nn.Module, Callable[[], object]]:
        model = kind(config)
        if lora:
            import peft  # noqa: PLC0415 - a part of one row

            model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear"))
        model.train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        ids = torch.zeros(batch, length, dtype=torch.long)

        def step() -> None:
            for _ in range(micro_batches):
                with torch.autocast("cuda", torch.bfloat16) if autocast else nullcontext():
                    loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, step

    return make


def vision(kind: Any, config: Any, batch: int, size: int) -> Make:
    def make() -> tuple[nn.Module, Callable[[], object]]:
        model = kind(config).train()
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        images, labels = torch.zeros(batch, 3, size, size), torch.zeros(batch, dtype=torch.long)

        def step() -> None:
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(model(images).logits.float(), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, step

    return make


_GPT2 = GPT2Config(use_cache=False)
_MEDIUM = GPT2Config(n_layer=24, n_embd=1024, n_head=16, use_cache=False)
_LLAMA = LlamaConfig(
    hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, intermediate_size=8192,
    vocab_size=32000, use_cache=False,
)  # fmt: skip
_EXPERTS = MixtralConfig(
    hidden_size=1024, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=8, intermediate_size=3584,
    num_local_experts=4, vocab_size=32000, use_cache=False,
)  # fmt: skip
_BERT = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
_T5 = T5Config(num_layers=12, d_model=768, d_ff=3072, num_heads=12, decoder_start_token_id=0, use_cache=False)
_VIT = ViTConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)

STEPS: dict[str, tuple[Make, float]] = {
    "GPT-2, 8 x 1024, float32": (language(GPT2LMHeadModel, _GPT2, 8, 1024, autocast=False), 0.75),
    "GPT-2, 8 x 1024": (language(GPT2LMHeadModel, _GPT2, 8, 1024), 0.6),
    "GPT-2 medium, 4 x 1024": (language(GPT2LMHeadModel, _MEDIUM, 4, 1024), 0.8),
    "GPT-2, 2 micro-batches of 4 x 1024": (language(GPT2LMHeadModel, _GPT2, 4, 1024, micro_batches=2), 0.75),
    "BERT-large, 16 x 512": (language(BertForMaskedLM, _BERT, 16, 512), 0.6),
    "Llama 1B, 2 x 4096": (language(LlamaForCausalLM, _LLAMA, 2, 4096), 0.75),
    "Llama 1B with LoRA, 2 x 4096": (language(LlamaForCausalLM, _LLAMA, 2, 4096, lora=True), 0.6),
    "Mixtral, 8 layers of 4 experts, 4 x 2048": (language(MixtralForCausalLM, _EXPERTS, 4, 2048), 0.8),
    "T5-base, 16 x 512": (language(T5ForConditionalGeneration, _T5, 16, 512), 0.6),
    "GPT-2 medium, 4 x 1024, captured": (language(GPT2LMHeadModel, _MEDIUM, 4, 1024), 0.8),
    "ViT-large, 64 images": (vision(ViTForImageClassification, _VIT, 64, 224), 0.5),
    "ResNet-50, 128 images": (vision(ResNetForImageClassification, ResNetConfig(), 128, 224), 0.6),
}


CAPTURED = {"GPT-2 medium, 4 x 1024, captured"}


def fake_step(make: Make, machine: DeviceProfile, *, is_captured: bool) -> tuple[FakeStep, nn.Module]:
    device = FakeDevice(machine)
    with device:
        model, step_fn = make()
    return FakeStep(device, model, step_fn, optimizers_of(step_fn), capture_after=3 if is_captured else None), model


def optimizers_of(step_fn: Callable[[], object]) -> list[torch.optim.Optimizer]:
    cells = getattr(step_fn, "__closure__", None) or ()
    return [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, torch.optim.Optimizer)]


def row_of(name: str, make: Make, share: float) -> dict[str, Any]:
    begin = time.process_time()
    machine = load_profile("h100")
    step, _ = fake_step(make, machine, is_captured=name in CAPTURED)
    allocations = step.run().allocations
    assert allocations is not None
    plain = step.replay(allocations)
    assert plain is not None
    limit = int(share * plain.reserved_bytes)
    card = replace(machine, name="card", memory_bytes=machine.context_bytes + limit)
    step, model = fake_step(make, card, is_captured=name in CAPTURED)
    plan = plan_step(step, model, find_blocks(model, None), "max", PlanOptions(progress=False), PlanGroup())
    with plan.apply(model):
        run = step.run()
    assert run.allocations is not None
    needed = step.least_capacity(run.allocations)
    return {
        "step": name,
        "limit_bytes": limit,
        "plain_bytes": plain.reserved_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "peak_bytes": run.peak_bytes,
        "least_capacity_bytes": needed,
        "predicted_reserved_bytes": plan.predicted_reserved_bytes,
        "expandable_reserved_bytes": plan.expandable_reserved_bytes,
        "seconds": round(time.process_time() - begin, 1),
    }


def report(rows: list[dict[str, Any]], head: dict[str, Any]) -> None:
    columns = [
        "step", "limit MiB", "peak MiB", "least capacity MiB", "above the peak", "limit above it", "reserved MiB",
        "expandable MiB", "CPU s",
    ]  # fmt: skip
    cells = [
        [
            row["step"],
            f"{row['limit_bytes'] / MIB:,.0f}",
            f"{row['predicted_peak_bytes'] / MIB:,.0f}",
            f"{row['least_capacity_bytes'] / MIB:,.0f}",
            f"{row['least_capacity_bytes'] / row['predicted_peak_bytes'] - 1:+.1%}",
            f"{row['limit_bytes'] / row['least_capacity_bytes'] - 1:+.1%}",
            f"{row['predicted_reserved_bytes'] / MIB:,.0f}",
            f"{row['expandable_reserved_bytes'] / MIB:,.0f}",
            f"{row['seconds']:.0f}",
        ]
        for row in rows
    ]
    write("capacity", head, rows, table(columns, cells))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", nargs="*", default=[""], metavar="WORD", help="only steps with one of these words")
    words = parser.parse_args(arguments).steps
    head = header()
    rows: list[dict[str, Any]] = []
    for name, (make, share) in STEPS.items():
        if any(word.lower() in name.lower() for word in words):
            rows.append(row_of(name, make, share))
            report(rows, head)


if __name__ == "__main__":
    main()
