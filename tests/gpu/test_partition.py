"""Saved tensors partitioned over two ranks on one CUDA device: bits of the plain step, slices, in a device's thread."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.layer_stacks import stack_of
from helpers.modules import as_module
from torch import Tensor, nn
from torch.multiprocessing import ProcessExitedException

import graphckpt
from graphckpt import Selective
from graphckpt.stores import Host, Partition, Placement, TensorGroup

pytestmark = [pytest.mark.gpu, pytest.mark.multi_process]

DEVICE = torch.device("cuda", 0)
RULES: dict[str, Any] = {"keep": None, "full": True, "selective": Selective("matmul")}
STORES: dict[str, dict[str, Any]] = {
    "device": {},
    "slab": {"contiguous": True},
    "pinned memory": {"offload": True},
    "pinned memory, nothing in flight": {"offload": Host(in_flight_bytes=0)},
    "pinned memory and slab": {"offload": True, "contiguous": True},
}


@as_module(lambda: {"up": nn.Linear(33, 66), "drop": nn.Dropout(0.1), "down": nn.Linear(66, 33)})
def Layer(self: Any, x: Tensor) -> Tensor:
    return x + self.down(self.drop(torch.tanh(self.up(x))))


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return stack_of(Layer, 4).to(DEVICE)


def input_of(length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randn(length, 33, generator=generator).to(DEVICE)


def train(model: nn.Module) -> list[Tensor]:
    """Returns losses and gradients of three steps; the last shape is a new one."""
    values = []
    torch.manual_seed(5)
    for length in (65, 65, 130):
        model.zero_grad()
        loss = model(input_of(length)).square().mean()
        loss.backward()  # in the device's own thread, which gathers
        values += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return values


def keeps_bits() -> None:
    plain = train(chain())
    for name in itertools.product(RULES, STORES):
        model = chain()
        policy = {"activation_checkpointing": RULES[name[0]], "partition": True, "min_elements": 1, **STORES[name[1]]}
        with graphckpt.apply(model, {"[0-3]": policy}) as handle:
            ours = train(model)
            stores = [wrapper.placement.store for wrapper in handle._wrappers if wrapper.placement is not None]
            assert stores, name
            assert all(store.num_alive == 0 for store in stores), name
            assert handle.explain(show=False).bytes_saved > 0, name
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True)), name


def keeps_slices() -> None:
    """A rank holds half of the bytes, in pinned memory none on the device."""
    torch.manual_seed(1)
    x = torch.randn(64, 32, device=DEVICE)
    for offload in (None, Host()):
        store: Any = Placement(partition=True, offload=offload).store
        group = store.open_group(TensorGroup("block", lambda: (), [].append))
        key = store.put(x, group)
        store.close_group(group)
        handle = key.piece.handle
        assert key.piece.store.stored_bytes(x.nbytes) == x.nbytes // 2
        assert handle.data is None
        if offload is None:
            assert handle.slice.nbytes == x.nbytes // 2
        else:
            assert handle.slice is None
            assert handle.inner.num_bytes == x.nbytes // 2
            assert handle.inner.block.flat.is_pinned()
        assert torch.equal(store.get(key), x)


def two_ranks(rank: int) -> None:
    keeps_bits()
    keeps_slices()


def ranks_that_differ(rank: int) -> None:
    """Equal at first, then other data on each rank: the device's assertion ends its work, and no gradient is used.

    PyTorch then raises an error, or ends the process as it frees a tensor.
    """
    model = chain()
    with graphckpt.apply(
        model, {"[0-3]": {"activation_checkpointing": True, "partition": Partition(timeout_seconds=20)}}
    ):
        train(model)
        with pytest.raises(RuntimeError, match="device-side assert"):  # noqa: PT012 - which of the two waits is the device's
            model(input_of(65) + rank).square().mean().backward()
            torch.cuda.synchronize()


def launch(check: Callable[[int], None], folder: Path, schedule: str | None) -> None:
    """Runs ``check(rank)`` on two ranks, which are new processes: CUDA does not survive a fork."""
    torch.multiprocessing.start_processes(_rank, (check, str(folder), schedule), nprocs=2, start_method="spawn")
    assert len(list(folder.glob("* is done"))) == 2


def _rank(rank: int, check: Callable[[int], None], folder: str, schedule: str | None) -> None:
    torch.cuda.set_device(DEVICE)
    backend = "gloo"
    if schedule is not None:
        from simulated_cuda import library, process_group  # noqa: PLC0415 - only there

        library.use_schedule(schedule)
        process_group.register()
        backend = process_group.NAME
    limit = timedelta(seconds=60)
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, timeout=limit)
    check(rank)
    Path(folder, f"{rank} is done").touch()
    end = time.monotonic() + 30  # gloo can abort a process whose peer has left
    while len(list(Path(folder).glob("* is done"))) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    os._exit(0)


@pytest.mark.parametrize("check", [two_ranks, ranks_that_differ], ids=["equal", "differ"])
def test_two_ranks_on_one_device(
    check: Any,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    tests = Path(__file__).parents[1]
    paths = [tests / "simulated_cuda" / "site", tests, tests.parent]  # new processes load the simulated device, too
    is_simulated = "simulated_cuda.plugin" in sys.modules
    if is_simulated:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
    try:
        launch(check, tmp_path, request.config.getoption("--schedule", None))
    except ProcessExitedException as error:
        assert (check, error.signal_name) == (ranks_that_differ, "SIGABRT")  # noqa: PT017 - it may, and need not, end so
    if check is ranks_that_differ and not is_simulated:
        message = capfd.readouterr().err
        assert "partition: gathered bytes differ" in message
        assert "fix: partition over ranks with the same data" in message
