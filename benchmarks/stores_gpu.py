"""Measures what moving saved tensors to host memory saves and costs on a CUDA device, beside other ways to do so.

Each variant runs in a process of its own: it builds the model (random weights, bfloat16), runs steps to warm up and
steps to time, eager and, for this library's own variants, captured as one CUDA graph, where no Python runs. A step is
forward, backward and fused AdamW.

With ``--ranks 2`` the model is tensor parallel over two processes on the one device, which talk by gloo, and what
counts is the bytes that forward keeps on a rank, also without the head and the loss, whose logits no policy moves.

    python benchmarks/stores_gpu.py [--models gpt2 gpt-1.3b] [--tokens 1024 4096] [--batch 8] [--steps 10]
        [--variants plain full] [--ranks 2] [--minutes 9] [--out FOLDER] [--name NAME]
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from capture_gpu import TINY, Step, captures_of, failure, model_of
from device import Bytes, Cuda, device_for
from jobs import Jobs, answer, arguments, cell
from processes import can_fork
from report import header, spread, table, write
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import graphckpt
from graphckpt.stores import Partition
from graphckpt.train.parallel.tensor_parallel import shard_model
from graphckpt.units import format_bytes, format_seconds

# Legend: B batch, T tokens

VOCABULARY = 50304
"""GPT-2's 50257, rounded up to a number that ranks can share."""
SHAPES: dict[str, dict[str, int]] = {
    "gpt2": {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": VOCABULARY},  # 124 million parameters
    "gpt-1.3b": {"n_embd": 2048, "n_layer": 24, "n_head": 16, "vocab_size": VOCABULARY},
}
RANK_SECONDS = 60


# ---- the variants: the policy on every layer, or what is done to the model and what is around its forward

Around = Callable[[], AbstractContextManager[Any]]


def transformers_own(model: Any, *, offload: bool) -> Around:
    """Checkpointing as Transformers has it."""
    if offload or hasattr(model, "activation_checkpointing_enable"):  # 5.17 has neither the name nor offload
        model.activation_checkpointing_enable(offload=offload)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return nullcontext


def torch_save_on_cpu(model: nn.Module) -> Around:
    """All that is saved goes to pinned memory."""
    return lambda: torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())


POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {"activation_checkpointing": True},
    "full, offload": {"activation_checkpointing": True, "offload": True},
    "offload all": {"offload": True},
}
OTHERS: dict[str, Callable[[Any], Around]] = {
    "Transformers": partial(transformers_own, offload=False),
    "Transformers, offload": partial(transformers_own, offload=True),
    "torch save_on_cpu": torch_save_on_cpu,
}
VARIANTS = [*POLICIES, *OTHERS]
SHARED: dict[str, Any] = {"offload": True, "contiguous": True}
"""On two ranks; ``partition`` is their mesh."""
RANK_VARIANTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "full, cpu+partition+contiguous": {"activation_checkpointing": True, **SHARED},
    "cpu+partition+contiguous": SHARED,
}


class Counted(Step):
    """A step that counts, when told to, what forward has left for backward."""

    def __init__(self, model: Any, policy: dict[str, Any], capture: Any, device: Cuda) -> None:
        super().__init__(model, policy, capture, autocast=False)
        self.device = device
        self.kept_bytes: list[int] | None = None

    def after_forward(self) -> None:
        if self.kept_bytes is not None:
            self.kept_bytes.append(self.device.bytes_now().allocated)


def measure(
    model: str, variant: str, batch: int, tokens: int, warm_up: int, steps: int, sizes: dict[str, int], device: Cuda
) -> Iterator[dict[str, Any]]:
    """Runs one variant in this process. Bytes are those of the allocators, seconds those of the wall."""
    policy = POLICIES.get(variant)
    for kind, capture in {"eager": "eager", "captured": device.capture}.items():
        if kind == "captured" and policy is None:
            continue
        row: dict[str, Any] = {"model": model, "batch": batch, "tokens": tokens, "variant": variant, "kind": kind}
        pinned_bytes = device.count_pinned()
        network = model_of(tokens, device, **(sizes or SHAPES[model])).to(torch.bfloat16)
        ids_BT = torch.randint(network.config.vocab_size, (batch, tokens), device=device.kind)
        around = nullcontext if policy is not None else OTHERS[variant](network)
        graph = Counted(network, policy or {}, capture, device)

        def step(graph: Counted = graph, around: Around = around, ids_BT: torch.Tensor = ids_BT) -> torch.Tensor:
            with around():
                loss: torch.Tensor = graph(ids_BT)
            return loss

        try:
            for _ in range(warm_up):
                loss = step()
            if kind == "eager":
                before = device.bytes_now().allocated
                graph.kept_bytes = []
                step()
                row["kept_bytes"] = graph.kept_bytes[0] - before
                graph.kept_bytes = None
            row |= device.peak_of(step, Bytes())
            row["step_seconds"] = spread(device.seconds_of(step, steps))
            row |= {"pinned_bytes": pinned_bytes(), "loss": loss.item()}
        except Exception as error:  # what has run still counts
            row |= failure(error)
        yield {**row, **captures_of(graph)}
        del graph, network, step
        device.release()


# ---- ranks


def measure_ranks(num_ranks: int, device: Cuda, **job: Any) -> Iterator[dict[str, Any]]:
    """Runs the variants for ranks; this process is rank 0, and the others are started here."""
    with tempfile.TemporaryDirectory() as folder:
        # Before this process uses CUDA; a process that is forked spares the imports.
        context: Any = multiprocessing.get_context("fork" if can_fork() else "spawn")
        shared = {"num_ranks": num_ranks, "folder": folder, "is_dry": device.is_dry, **job}
        for rank in range(1, num_ranks):
            context.Process(target=follow, args=(rank, shared), daemon=True).start()
        yield from measure_rank(0, device, **{key: value for key, value in shared.items() if key != "is_dry"})


def follow(rank: int, shared: dict[str, Any]) -> None:
    """Runs on each rank but the first."""
    device = device_for(is_dry=shared.pop("is_dry"))
    for _ in measure_rank(rank, device, **shared):
        pass


def measure_rank(
    rank: int,
    device: Cuda,
    num_ranks: int,
    folder: str,
    model: str,
    batch: int,
    tokens: int,
    warm_up: int,
    sizes: dict[str, int],
) -> Iterator[dict[str, Any]]:
    """Runs the variants on one rank and yields a row for each."""
    limit = timedelta(seconds=RANK_SECONDS)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_ranks, timeout=limit
    )
    # init_device_mesh would create a group of NCCL, which refuses two ranks on one device
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.kind, mesh_dim_names=("tp",))
    for variant, fields in RANK_VARIANTS.items():
        row = {"model": model, "batch": batch, "tokens": tokens, "variant": variant, "ranks": num_ranks}
        network = shard_model(model_of(tokens, device, **(sizes or SHAPES[model])), mesh)
        ids_BT = torch.randint(network.config.vocab_size, (batch, tokens), device=device.kind)
        partition = {} if fields is None else {"partition": Partition(mesh, RANK_SECONDS), **fields}
        with graphckpt.apply(network, {"transformer.h.*": partition}) as handle:
            for _ in range(warm_up):
                network(input_ids=ids_BT, labels=ids_BT).loss.backward()
            before = device.bytes_now().allocated
            hidden = network.transformer(input_ids=ids_BT).last_hidden_state
            row["layers_kept_bytes"] = device.bytes_now().allocated - before
            hidden.square().mean().backward()  # without it a store holds the sources of its last copies
            del hidden
            before = device.bytes_now().allocated
            loss = network(input_ids=ids_BT, labels=ids_BT).loss
            row["kept_bytes"] = device.bytes_now().allocated - before
            loss.backward()
            step = partial(one_step, network, ids_BT)
            row |= device.peak_of(step, Bytes())
            row["notes"] = sorted({one.note for one in handle.explain(show=False).rows if one.note})
        yield {**row, "loss": loss.item()}
        del network, handle, loss, step
        device.release()


def one_step(network: Any, ids_BT: torch.Tensor) -> None:
    """Runs forward and backward."""
    network(input_ids=ids_BT, labels=ids_BT).loss.backward()


# ---- all


def row(result: dict[str, Any]) -> list[str]:
    """Returns the cells of the table."""
    ranks = result.get("ranks") or result.get("num_ranks")
    kind = result.get("kind", "both") if ranks is None else f"{ranks} ranks"
    place = [result.get("variant", "all"), result["model"], f"{result['batch']} x {result['tokens']}", kind]
    if "failed" in result:
        return [*place, f"failed: {result['failed']}", *["-"] * 3]
    sizes = [cell(result.get(key), format_bytes) for key in ("kept_bytes", "peak_bytes", "pinned_bytes")]
    return [*place, *sizes, cell(result.get("step_seconds"), lambda seconds: format_seconds(seconds["median"]))]


def main() -> None:
    """Runs all, in turn, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=1, help="2: tensor parallel over processes on this device")
    parser.add_argument("--warm-up", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10)
    arguments(parser, minutes=9)
    options = parser.parse_args()
    device = device_for(is_dry=options.dry_run)
    if options.job is not None:
        work = measure_ranks if "num_ranks" in options.job else measure
        answer(work(**options.job, device=device))
        return
    sizes: dict[str, int] = {}
    if options.dry_run:
        options.models, options.tokens, options.batch, options.warm_up, options.steps = ["gpt2"], [32], 1, 4, 2
        sizes = TINY
    head = header(**device.header(), steps=options.steps, warm_up=options.warm_up)
    jobs = Jobs(__file__, options, head)
    for tokens in options.tokens:
        for model in options.models:
            job = {"model": model, "batch": options.batch, "tokens": tokens, "sizes": sizes, "warm_up": options.warm_up}
            if options.ranks > 1:
                jobs.run({**job, "num_ranks": options.ranks})
                continue
            for variant in options.variants:
                jobs.run({**job, "variant": variant, "steps": options.steps})
    columns = ["variant", "model", "batch x tokens", "step", "kept", "peak", "pinned", "time"]
    text = (
        "kept: allocated between forward and backward. peak: most that was allocated, weights, gradients and optimizer "
        "included; of captured steps, beside the pool. pinned: most host memory that was pinned. time: a step, the "
        "median.\n\n"
    )
    write(jobs.name, head, jobs.rows, text + table(columns, [row(result) for result in jobs.rows]), options.out)


if __name__ == "__main__":
    main()
