"""Times a GPT-2 whose blocks are compiled, with and without recompute around them, against the same in eager mode.

All variants run in one process, in turns and in a new random order each turn; a ratio compares two variants of one
turn. The first steps, in which the compiler works, are timed apart.

    python benchmarks/compile.py [--layers 12] [--width 256] [--batch 4] [--length 128] [--dropout 0.1] [--turns 15]
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
from report import header, spread, table, write
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import graphckpt

VARIANTS: dict[str, dict[str, Any]] = {
    "eager": {},
    "eager, full": {"activation_checkpointing": True},
    "compiled": {"compile": True},
    "compiled, full": {"activation_checkpointing": True, "compile": True},
}


def build(args: argparse.Namespace) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_layer": args.layers, "n_embd": args.width, "n_head": args.width // 64, "n_positions": args.length}
    more = {"vocab_size": 1024, "bos_token_id": 1, "eos_token_id": 2, "loss_type": "ForCausalLM", "use_cache": False}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), args.dropout)
    return GPT2LMHeadModel(GPT2Config(**sizes, **more, **dropout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 12), ("width", 256), ("batch", 4), ("length", 128), ("turns", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dropout", type=float, default=0.1)
    args = parser.parse_args()
    logging.set_verbosity_error()
    model = f"GPT-2, {args.layers} layers of width {args.width}, batch {args.batch} x {args.length}"
    head = header(model=f"{model}, dropout {args.dropout}", turns=args.turns)
    tokens = torch.randint(0, 1024, (args.batch, args.length), generator=torch.Generator().manual_seed(0))
    steps: dict[str, Callable[[], list[torch.Tensor]]] = {}
    first: dict[str, float] = {}
    kept: dict[str, int] = {}
    gradients: dict[str, list[torch.Tensor]] = {}
    for name, fields in VARIANTS.items():
        model = build(args)
        handle = graphckpt.apply(model, {"transformer.h.*": fields} if fields else {})

        def step(model: GPT2LMHeadModel = model, handle: graphckpt.Handle = handle) -> list[torch.Tensor]:
            torch.manual_seed(1)
            model.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            return [p.grad for p in model.parameters() if p.grad is not None]

        begin = perf_counter()
        step()
        first[name] = perf_counter() - begin
        with handle.measure():
            step()
        kept[name] = handle.explain(show=False).bytes_after
        gradients[name] = [g.clone() for g in step()]
        steps[name] = step
    seconds: dict[str, list[float]] = defaultdict(list)
    order = list(steps)
    for _ in range(args.turns):
        random.shuffle(order)
        for name in order:
            begin = process_time()
            steps[name]()
            seconds[name].append(process_time() - begin)
    rows = []
    for name in VARIANTS:
        ratios = [a / b for a, b in zip(seconds[name], seconds["eager, full"], strict=True)]
        equal = gradients["compiled" if "compiled" in name else "eager"]
        rows.append(
            {
                "variant": name,
                "ms": median(seconds[name]) * 1e3,
                "x eager, full": median(ratios),
                "spread": spread(ratios),
                "kept MiB": kept[name] / 2**20,
                "first step s": first[name],
                "same bits": all(torch.equal(a, b) for a, b in zip(gradients[name], equal, strict=True)),
            }
        )
    columns = ["variant", "CPU ms", "x eager, full", "kept, MiB", "first step, s", "same bits as without recompute"]
    lines = [
        [
            r["variant"], f"{r['ms']:.0f}", f"{r['x eager, full']:.2f}", f"{r['kept MiB']:.1f}",
            f"{r['first step s']:.1f}", "yes" if r["same bits"] else "no",
        ]
        for r in rows
    ]  # fmt: skip
    write("compile" if args.dropout else "compile_without_dropout", head, rows, table(columns, lines))


if __name__ == "__main__":
    main()
