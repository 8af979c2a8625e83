"""Measures what keeping a model's activations on disk saves and costs, beside recomputing them and beside torch's own.

Each variant of each repeat runs in a process of its own: it builds GPT-2 124M (random weights), runs one step to warm
up and some to time, and then one step more, in which the resident set is watched. No optimizer.

    python benchmarks/stores.py [--batch 4 512] [--repeats 3] [--steps 3] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter, process_time, sleep
from typing import Any, Self

import torch
from memory import gpt2
from report import header, spread, table, write
from torch import Tensor, nn
from transformers.utils import logging

import graphckpt
from graphckpt.stores import Disk, TensorGroup

# Legend: B batch, T tokens

# ---- the variants: each takes the model and the folder, and returns what forward runs under


def plain(_model: nn.Module, _folder: str) -> AbstractContextManager[Any]:
    return nullcontext()


def save_on_cpu(_model: nn.Module, _folder: str) -> AbstractContextManager[Any]:
    return torch.autograd.graph.save_on_cpu()


def ours(model: nn.Module, folder: str, rule: Any, in_flight: str | None = None) -> AbstractContextManager[Any]:
    fields = {"activation_checkpointing": rule}
    if in_flight is not None:
        fields["offload"] = Disk(folder, in_flight_bytes=in_flight)
    graphckpt.apply(model, {"transformer.h.*": fields})
    return nullcontext()


VARIANTS: dict[str, Callable[[nn.Module, str], AbstractContextManager[Any]]] = {
    "plain": plain,
    "torch save_on_cpu": save_on_cpu,
    "graphckpt keep, disk": partial(ours, rule=False, in_flight="256MiB"),
    "graphckpt keep, disk, 64 MiB in flight": partial(ours, rule=False, in_flight="64MiB"),
    "graphckpt full": partial(ours, rule="full"),
    "graphckpt full, disk": partial(ours, rule="full", in_flight="256MiB"),
}


# ---- one process


class HighWater:
    """The largest resident set while it runs, seen every 2 ms: unlike ``ru_maxrss`` it forgets the model's building."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._is_over = False
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over:
            self.num_bytes = max(self.num_bytes, resident_bytes())
            sleep(0.002)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(variant: str, shape: tuple[int, int], num_steps: int, folder: str) -> dict[str, Any]:
    """Builds one variant and measures it, in a fresh process."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    torch.manual_seed(0)
    model = gpt2().train()
    forward_in = VARIANTS[variant](model, folder)
    ids_BT = torch.randint(0, model.config.vocab_size, shape)
    parameters = list(model.parameters())

    def step() -> tuple[float, int]:
        model.zero_grad()
        with forward_in:
            loss: Tensor = model(input_ids=ids_BT, labels=ids_BT).loss
        gc.collect()
        after_forward = resident_bytes()
        loss.backward()
        return loss.item(), after_forward

    torch.manual_seed(1)
    loss, _ = step()
    gradient = hash(tuple(p.grad.view(torch.int32).sum().item() for p in parameters if p.grad is not None))
    seconds, cpu_seconds, after_forward = [], [], []
    for _ in range(num_steps):
        begin, cpu_begin = perf_counter(), process_time()
        after_forward.append(step()[1])
        seconds.append(perf_counter() - begin)
        cpu_seconds.append(process_time() - cpu_begin)
    with HighWater() as high_water:  # a step of its own: looking takes time
        step()
    return {
        "variant": variant,
        "loss": loss,
        "gradient": gradient,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "rss_peak_bytes": high_water.num_bytes,
        "rss_after_forward_bytes": max(after_forward),
        "rss_peak_of_process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


# ---- all of them


def main() -> None:
    """Measures all and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--batch", nargs=2, type=int, default=[4, 512], metavar=("BATCH", "TOKENS"))
    parser.add_argument("--repeats", type=int, default=3, help="processes per variant, in turns")
    parser.add_argument("--steps", type=int, default=3, help="timed steps per process")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="a folder on the disk")
    parser.add_argument("--one", metavar="VARIANT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, tuple(options.batch), options.steps, options.folder)))
        return
    torch.set_num_threads(1)
    write_speed, read_speed = disk_speed(options.folder)
    head = header(
        n=f"processes per variant (in turns): {options.repeats}; timed steps in each: {options.steps}",
        batch=f"{options.batch[0]} x {options.batch[1]} tokens, float32, dropout 0.1, forward and backward",
        disk=f"{write_speed:.2f} GB/s written, {read_speed:.2f} GB/s read, by one thread, measured at the start",
        rss_peak="largest resident set during one more step, median",
        rss_after_forward="resident set between forward and backward, median",
        step="wall seconds, median and least; CPU seconds of the whole process, median",
    )
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for turn in range(options.repeats):
        for variant in options.variants:
            result = in_a_process(variant, options)
            found[variant].append(result)
            brief = result.get("error") or f"{result['rss_peak_bytes'] / 2**20:.0f} MiB, {min(result['seconds']):.2f} s"
            print(f"{turn + 1}/{options.repeats} {variant}: {brief}", file=sys.stderr, flush=True)
    rows = [row(variant, results) for variant, results in found.items()]
    write("stores_gpt2_{}x{}".format(*options.batch), head, rows, text(rows))


def disk_speed(folder: str) -> tuple[float, float]:
    """Returns GB/s of writing and reading 512 MiB as the disk store does."""
    from graphckpt.stores.disk import DiskStore, _DiskHandle  # noqa: PLC0415 - only here

    store, group = DiskStore(torch.device("cpu"), folder, 2**30), TensorGroup("disk", list, print)
    data = torch.ones(512 * 2**20, dtype=torch.uint8)
    begin = perf_counter()
    handle = store.put(data, group)
    assert isinstance(handle, _DiskHandle)
    handle.write.result()
    middle = perf_counter()
    store.get(handle, group)
    end = perf_counter()
    store.close()
    return data.numel() / (middle - begin) / 1e9, data.numel() / (end - middle) / 1e9


def in_a_process(variant: str, options: Any) -> dict[str, Any]:
    numbers = ["--steps", str(options.steps), "--batch", *map(str, options.batch), "--folder", options.folder]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, "--one", variant, *numbers],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"variant": variant, "error": f"exit {done.returncode}: {last}"}
    return json.loads(done.stdout.strip().splitlines()[-1])  # type: ignore[no-any-return]


def row(variant: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    good = [result for result in results if "error" not in result]
    found: dict[str, Any] = {"variant": variant, "n": len(good)}
    errors = [result["error"] for result in results if "error" in result]
    if errors:
        found["errors"] = errors
    if good:
        for key in ("rss_peak_bytes", "rss_after_forward_bytes", "rss_peak_of_process_bytes"):
            found[key] = spread([result[key] for result in good])
        for key in ("seconds", "cpu_seconds"):
            found[key] = spread([value for result in good for value in result[key]])
        found |= {"loss": good[0]["loss"], "gradient": good[0]["gradient"]}
    return found


def text(rows: list[dict[str, Any]]) -> str:
    base = next((each for each in rows if each["variant"] == "plain" and each["n"]), None)
    lines = []
    for each in rows:
        if not each["n"]:
            lines.append([each["variant"], "failed", "", "", "", "", "", ""])
            continue
        peak, after = (each[key]["median"] / 2**20 for key in ("rss_peak_bytes", "rss_after_forward_bytes"))
        seconds, cpu = each["seconds"], each["cpu_seconds"]["median"]
        ratio = bits = ""
        if base is not None:
            ratio = f"{seconds['median'] / base['seconds']['median']:.2f}"
            bits = "same" if each["gradient"] == base["gradient"] else "other"
        wall = [f"{seconds['median']:.2f}", f"{seconds['min']:.2f}"]
        lines.append([each["variant"], f"{peak:.0f}", f"{after:.0f}", *wall, ratio, f"{cpu:.2f}", bits])
    columns = [
        "variant",
        "RSS peak MiB",
        "RSS after forward MiB",
        "step s",
        "least",
        "x plain",
        "CPU s",
        "gradient bits",
    ]
    errors = [f"- {each['variant']}: {each['errors'][0]}" for each in rows if "errors" in each]
    return "\n".join([table(columns, lines), *(["", *errors] if errors else []), ""])


if __name__ == "__main__":
    main()
