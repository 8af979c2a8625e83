"""Runs a script in a new process that has imported what all scripts need, which takes seconds; not a test itself."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

PRELOADED = (
    "graphckpt.config.trainer",
    "graphckpt.cli",
    "torch.distributed.checkpoint.state_dict_saver",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
)
_SECONDS = 600


class Done(NamedTuple):
    code: int | None
    stdout: str
    stderr: str


def preload() -> None:
    """Has new processes forked from one with these modules; to be called before the first of them starts."""
    multiprocessing.set_forkserver_preload(list(PRELOADED))


def run_script(script: str | Path, *words: str, folder: Path) -> Done:
    """Runs a file, or a module by its name, as ``python -W error`` does; what it writes goes through ``folder``."""
    preload()
    outputs = [folder / "stdout.txt", folder / "stderr.txt"]
    process = multiprocessing.get_context("forkserver").Process(target=_run, args=(str(script), words, outputs))
    process.start()
    process.join(_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
    return Done(process.exitcode, *(path.read_text(encoding="utf-8") for path in outputs))


def _run(script: str, words: tuple[str, ...], outputs: list[Path]) -> None:
    for number, path in enumerate(outputs, start=1):
        with path.open("w") as file:
            os.dup2(file.fileno(), number)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    os.environ["COLUMNS"] = "200"
    sys.argv = [script, *words]
    if script.endswith(".py"):
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_path(script, run_name="__main__")
    else:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
