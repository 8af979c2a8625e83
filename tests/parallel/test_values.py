"""The value check on several ranks: one that raises alone ends the others, and says what to do where it is caught."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import launch, run_on_ranks, say_done
from torch import Tensor, nn
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import ProcessExitedException
from torch.nn.parallel import DistributedDataParallel

import graphckpt
from graphckpt.engine import values

pytestmark = pytest.mark.multi_process

D = 16


class Reader(nn.Module):
    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x) * Reader.factor))


def sharded(wrap: str) -> tuple[nn.Module, graphckpt.Handle]:
    torch.manual_seed(0)
    model = nn.Sequential(Reader(), Reader())
    handle = graphckpt.apply(model, {"*": True}, determinism_check="values")
    if wrap == "ddp":
        return DistributedDataParallel(model), handle
    for block in model:
        fully_shard(block)
    return fully_shard(model), handle


def every_step_is_quiet(rank: int, wrap: str) -> None:
    compared = []
    compare = values.Comparison._compare

    def note(self: values.Comparison, position: int, original: values.Sketch, tensor: Tensor) -> None:
        compared.append(position)
        compare(self, position, original, tensor)

    values.Comparison._compare = note  # type: ignore[method-assign]
    model, _ = sharded(wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(4):
        torch.manual_seed(10 * number + rank)
        model(torch.randn(4, D)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(compared) == 4 * (4 + 5), "what goes into both layers and out of tanh, and weights, but not of the first"


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_steps_that_differ_in_nothing_are_quiet(wrap: str, tmp_path: Path) -> None:
    launch(every_step_is_quiet, 2, tmp_path, wrap)


ERROR = r"RecomputeError: 1: saved tensor \d, saved by torch.tanh at (?s:.*)destroy_process_group\(\)"


def backward_of_another_factor(rank: int, wrap: str) -> None:
    """Runs a step, and one in whose recomputation rank 0 alone reads another value."""
    model, _ = sharded(wrap)
    model(torch.randn(4, D)).square().mean().backward()
    loss = model(torch.randn(4, D)).square().mean()
    if rank == 0:
        Reader.factor = 1.01
    loss.backward()


SCRIPT = """
import sys
import torch.distributed as dist
from tests.parallel.test_values import backward_of_another_factor

dist.init_process_group("gloo")
backward_of_another_factor(dist.get_rank(), sys.argv[1])
"""


@pytest.mark.parametrize("wrap", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_an_error_on_one_rank_ends_the_other(
    wrap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Under torchrun, within seconds: gloo itself would wait for half an hour."""
    (tmp_path / "script.py").write_text(SCRIPT)
    tests = Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{tests.parent}:{tests}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    begin = time.monotonic()
    with pytest.raises(ChildFailedError):  # torchrun in this process, which has imported what it needs
        torchrun.main(["--nproc-per-node", "2", "--standalone", str(tmp_path / "script.py"), wrap])
    assert time.monotonic() - begin < 60, "it takes less than ten seconds"
    assert re.search(ERROR, "".join(capfd.readouterr()))


def catch(rank: int, folder: Path, wrap: str) -> None:
    try:
        backward_of_another_factor(rank, wrap)
    except Exception as error:
        (folder / f"caught by {rank}").write_text(f"{type(error).__name__}: {error}")
        dist.destroy_process_group()
    say_done(rank, str(folder))
    os._exit(0)  # as a script ends: what FSDP2 refers to keeps connections open until then


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_an_error_that_is_caught_ends_the_other_rank_with_the_process_group(wrap: str, tmp_path: Path) -> None:
    aborted = None
    try:
        run_on_ranks(catch, tmp_path, wrap, seconds=60)
    except ProcessExitedException as error:  # gloo's threads may abort the process
        aborted = error.error_index, error.signal_name
    assert re.match(ERROR, (tmp_path / "caught by 0").read_text())
    assert aborted == (1, "SIGABRT") or re.match(r"\w*Error", (tmp_path / "caught by 1").read_text())
