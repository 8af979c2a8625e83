"""The value check on several ranks: one that raises alone ends the others, and says what to do where it is caught."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.ranks import launch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
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


SCRIPT = """
import sys, time
import torch
import torch.distributed as dist
from tests.parallel.test_values import D, Reader, sharded

dist.init_process_group("gloo")
rank, wrap, is_caught = dist.get_rank(), sys.argv[1], sys.argv[2] == "caught"
model, _ = sharded(wrap)
model(torch.randn(4, D)).square().mean().backward()
loss = model(torch.randn(4, D)).square().mean()
if rank == 0:
    Reader.factor = 1.01
try:
    loss.backward()
except Exception as error:
    if not is_caught:
        raise
    print(f"rank {rank} caught {type(error).__name__}: {error}", flush=True)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("wrap", "handling"),
    [
        ("ddp", "raised"),
        pytest.param("ddp", "caught", marks=pytest.mark.slow),
        pytest.param("fsdp2", "raised", marks=pytest.mark.slow),
        ("fsdp2", "caught"),
    ],
)
def test_an_error_on_one_rank_ends_the_other(wrap: str, handling: str, tmp_path: Path) -> None:
    """Under torchrun, within seconds; where it is caught, as soon as the process group is destroyed."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    tests = Path(__file__).parents[1]
    variables = {**os.environ, "PYTHONPATH": f"{tests.parent}:{tests}", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, str(tmp_path / "script.py"), wrap, handling],
        capture_output=True,
        text=True,
        timeout=60,  # it takes less than ten seconds; gloo itself would wait for half an hour
        check=False,
        env=variables,
    )
    said = run.stdout + run.stderr
    error = r"RecomputeError: 1: saved tensor \d, saved by torch.tanh at .*destroy_process_group\(\)"
    assert re.search(error, said), said
    if handling == "caught":
        assert re.search(r"rank 1 caught \w*Error|SIGABRT", said), said  # gloo's threads may abort the process
    else:
        assert run.returncode != 0, said
