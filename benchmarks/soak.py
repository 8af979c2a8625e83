"""Trains for many steps under each policy, with changing shapes, errors and evaluation, and looks for growth.

Each case runs in a process of its own. What a step leaves is measured after a tenth of the steps and at the end: bytes
of tensors, resident memory, open file descriptors, threads, and objects of Python's garbage collector. Exits with 1 if
any has grown. Each row is written as it comes.

    OMP_NUM_THREADS=1 python benchmarks/soak.py [--steps 10000] [--cases full disk] [--seed 0] [--together]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
from processes import run
from report import RESULTS, header, table, write
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

import graphckpt
from graphckpt.rules.tiles import Tiles

WIDTH, LAYERS, ROWS = 32, 4, (64, 96, 160)
MOST = {"tensors": 2048, "resident": 4 * 2**20, "descriptors": 0, "threads": 0, "objects": 20}
"""By how much each may grow: resident memory by gaps of an allocator, tensors by a longer batch, objects by caches."""
COLUMNS = {"tensors": "tensors, bytes", "resident": "resident, KiB"}
SECONDS = 3600  # that a case may take
CYCLE = 20  # steps, of which some evaluate, or raise an error
LEAST = 3 * CYCLE  # steps before the first measurement

Step = Callable[[int], None]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.mlp(self.norm(x)))


class RowLayer(nn.Module):
    """A layer that computes on each row alone, as `tiles` need."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


class BadBatch(Exception):
    """An error of the program."""


def evaluate(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model.eval()(x)
    model.train()


class Loop:
    """A training with shapes that change, errors at several places, and evaluation between."""

    def __init__(self, policies: Any, make_layer: Callable[[], nn.Module] = Layer) -> None:
        self.model = nn.Sequential(*(make_layer() for _ in range(LAYERS)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.handle = graphckpt.apply(self.model, policies)

    def __call__(self, number: int) -> None:
        x = torch.randn(ROWS[random.randrange(len(ROWS))], WIDTH)
        kind = number % CYCLE
        if kind == 0:
            evaluate(self.model, x)
            return
        try:
            self.step(x, kind)
        except BadBatch:
            self.optimizer.zero_grad()

    def step(self, x: Tensor, kind: int) -> None:
        hook = None
        if kind in (1, 2):  # an error between two blocks, or in the backward between them
            hook = self.model[LAYERS // 2].register_forward_hook(fail if kind == 1 else fail_in_backward)
        try:
            loss = self.model(x).square().mean()
        finally:
            if hook is not None:
                hook.remove()
        if kind == 3:  # no backward
            return
        if kind == 4:
            loss.backward(retain_graph=True)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def last(self) -> None:
        """A plain step of one shape: what it leaves is compared."""
        self.step(torch.randn(ROWS[0], WIDTH), -1)


def fail(*_: object) -> None:
    raise BadBatch


def fail_in_backward(_: object, __: object, output: Tensor) -> None:
    output.register_hook(fail)


class Train(graphckpt.Graph):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))

    def build(self, x: Tensor, is_bad: bool) -> Tensor:
        loss = self.model(x).square().mean()
        if is_bad:
            raise BadBatch
        loss.backward()
        return loss


class GraphLoop:
    def __init__(self, **settings: Any) -> None:
        self.model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.graph = Train(self.model)
        self.graph.config.plan_options = {"progress": False}
        for name, value in settings.items():
            setattr(self.graph.config, name, value)

    def __call__(self, number: int) -> None:
        x = torch.randn(ROWS[random.randrange(len(ROWS))], WIDTH)
        kind = number % CYCLE
        if kind == 0:
            evaluate(self.model, x)
            return
        with suppress(BadBatch):
            self.graph(x, kind == 1)

    def last(self) -> None:
        self.graph(torch.randn(ROWS[0], WIDTH), False)


def in_callback(steps: int, see: Callable[[int], None]) -> None:
    """Trains with Transformers' trainer, whose callback plans for a budget; evaluates every 50 steps."""
    import transformers  # noqa: PLC0415  # other cases need none of it
    from transformers.utils import logging  # noqa: PLC0415

    from graphckpt.integrations.transformers import GraphckptCallback  # noqa: PLC0415

    logging.set_verbosity_error()

    class See(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            # Without graphckpt too, these grow with each evaluation.
            state.log_history.clear()
            del trainer.accelerator._dataloaders[1:]
            see(state.global_step)

    lengths = [random.choice(ROWS) for _ in range(64)]
    data = [{"input_ids": torch.randint(0, 64, (n,)), "labels": torch.randint(0, 64, (n,))} for n in lengths]
    sizes = {"n_embd": 32, "n_positions": max(ROWS), "vocab_size": 64, "n_layer": LAYERS, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    with tempfile.TemporaryDirectory() as folder:
        fixed = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
        how = {"eval_strategy": "steps", "eval_steps": 50, "logging_strategy": "no", "dataloader_pin_memory": False}
        arguments = transformers.TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=1, per_device_eval_batch_size=1, seed=1, **fixed, **how
        )
        callbacks = [GraphckptCallback(memory_budget=0.9, report=False, progress=False), See()]
        trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=callbacks)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()


def compiled(steps: int) -> Loop:
    import torch._functorch.config  # noqa: PLC0415  # a module that compiling imports

    torch._functorch.config.donated_buffer = False  # some steps run backward twice
    # The compiler takes seconds for each shape: a short soak has a backend that compiles nothing.
    return Loop(
        {"*": {"activation_checkpointing": True, "compile": {"backend": "inductor" if steps > 500 else "aot_eager"}}}
    )


CASES: dict[str, Callable[[int], Any]] = {
    "plain": lambda _: Loop({}),
    "full": lambda _: Loop({"*": True}),
    "selective": lambda _: Loop({"*": "selective"}),
    "segments": lambda _: Loop({"": {"activation_checkpointing": True, "segments": 2}}),
    "tiles": lambda _: Loop({"*": Tiles(2)}, RowLayer),
    "joined": lambda _: Loop({"0": True, "1": "joined", "2": True, "3": "joined"}),
    "disk": lambda _: Loop({"*": {"activation_checkpointing": True, "offload": "disk", "min_elements": 1}}),
    "slab": lambda _: Loop({"*": {"activation_checkpointing": True, "contiguous": True}}),
    "values": lambda _: Loop({"*": {"activation_checkpointing": True, "determinism_check": "values"}}),
    "budget in a Graph": lambda _: GraphLoop(memory_budget=0.9),
    "compiled": compiled,
}
IN_CALLBACK = "budget in a callback"
NAMES = [*CASES, IN_CALLBACK]


def measure() -> dict[str, int]:
    """Returns what is there between two steps."""
    gc.collect()
    tensors = [
        t for t in gc.get_objects() if issubclass(type(t), Tensor) and t.layout is torch.strided and not is_fake(t)
    ]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    del tensors
    # What a collection frees may let others go, the storages have become objects by now, and a thread that copies may
    # hold those of a step for a moment.
    num_objects = sys.maxsize
    for _ in range(20):
        gc.collect()
        before, num_objects = num_objects, min(num_objects, len(gc.get_objects()))
        if before == num_objects:
            break
        sleep(0.01)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return {
        "tensors": sum(storages.values()),
        "resident": pages * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "objects": num_objects,
    }


def soak(name: str, steps: int, seed: int) -> dict[str, Any]:
    """Runs a case; returns what was there after a tenth of the steps, and at the end."""
    warnings.simplefilter("ignore")
    random.seed(seed)
    torch.manual_seed(seed)
    begin, tenth = perf_counter(), max(min(LEAST, steps // 2), steps // 10)
    rows: list[dict[str, int]] = []
    gc.freeze()  # what imports have made is left out, which takes most of the time
    measure()  # what it needs is there from now on
    if name == IN_CALLBACK:
        in_callback(steps, lambda number: rows.append(measure()) if number in (tenth, steps) else None)
    else:
        loop = CASES[name](steps)
        for number in range(1, steps + 1):
            loop(number)
            if number in (tenth, steps):
                loop.last()
                rows.append(measure())
    gc.unfreeze()
    return {"case": name, "steps": steps, "seconds": perf_counter() - begin, "first": rows[0], "last": rows[-1]}


def grown(row: dict[str, Any]) -> list[str]:
    """Returns what has grown by more than it may."""
    return [key for key, most in MOST.items() if row["last"][key] - row["first"][key] > most]


def text_of(rows: Sequence[dict[str, Any]]) -> str:
    cells = []
    for row in rows:
        values = []
        for key in MOST:
            unit = 1024 if key == "resident" else 1
            first, last = (row[when][key] // unit for when in ("first", "last"))
            values.append(f"{first:,} {last - first:+,}" + (" **grown**" if key in grown(row) else ""))
        cells.append([row["case"], f"{row['steps']:,}", *values, f"{row['seconds']:.0f}"])
    columns = ["case", "steps", *(COLUMNS.get(key, key) for key in MOST), "seconds"]
    return "What is there after a tenth of the steps, and by how much more it is at the end.\n\n" + table(
        columns, cells
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--compiled-steps", type=int, default=None, help="of compiled blocks; a tenth if left out")
    parser.add_argument("--cases", nargs="*", default=NAMES, choices=NAMES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--together", action="store_true", help="all cases in this process; nothing is written")
    parser.add_argument("--json", action="store_true", help="one case in this process; prints its row")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if options.json:
        print(json.dumps(soak(options.cases[0], options.steps, options.seed)))
        return 0
    head = header(seed=options.seed, limits=", ".join(f"{key} {most:,}" for key, most in MOST.items()))
    rows = []
    for name in options.cases:
        steps = (
            options.steps
            if name != "compiled"
            else options.compiled_steps or min(options.steps, max(500, options.steps // 10))
        )
        if options.together:
            rows.append(soak(name, steps, options.seed))
            continue
        words = [__file__, "--json", "--steps", str(steps), "--seed", str(options.seed), "--cases", name]
        done = run(words, SECONDS)
        if done.code != 0:
            print(f"{name}: ended with {done.code}\n{done.stdout[-500:]}{done.stderr[-3000:]}")
            return 1
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(text_of(rows[-1:]).splitlines()[-1], flush=True)
        with (RESULTS / "soak.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    if options.together:
        print(text_of(rows))
    else:
        write("soak", head, rows, text_of(rows))
    return int(any(map(grown, rows)))


if __name__ == "__main__":
    sys.exit(main())
