"""A gradient scaler in a simulated step has the ops and the bytes of a real one, and is as before afterwards."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import graphckpt
from graphckpt._compat import is_fake
from graphckpt.config.run import fake_steps_from
from graphckpt.ledger.live_memory import LiveBytes
from graphckpt.simulation.fake_cluster import FakeCluster
from graphckpt.simulation.fake_device import FakeDevice
from graphckpt.simulation.op_costs import moved_bytes
from graphckpt.simulation.profile import load_profile

WIDTH = 64
SMALL = ["model.config.n_layer=2", "model.config.n_embd=64", "model.config.n_head=4", "data.seq_length=64"]
SCALING = "_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_"


class Ops(TorchDispatchMode):
    """Notes the names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def layers() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)])


def step_of(model: nn.Module, scaler: torch.amp.GradScaler, device: str = "cpu", **options: Any) -> Callable[[], None]:
    x, optimizer = torch.zeros(8, WIDTH, device=device), torch.optim.AdamW(model.parameters(), **options)

    def step() -> None:
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        assert scaler.get_scale() == scale
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_a_scaled_step_has_the_ops_and_the_bytes_of_a_real_one(options: dict[str, Any]) -> None:
    def steps(device: contextlib.AbstractContextManager[Any]) -> list[tuple[list[str], int, int]]:
        found = []
        with device:
            is_simulated = is_fake(torch.zeros(1))
            model = layers()
            step = step_of(model, torch.amp.GradScaler("cpu"), **options)
            for _ in range(2):
                live = LiveBytes("meta" if is_simulated else "cpu", counts_fake=is_simulated, record_timeline=False)
                live.track(model.parameters())
                with live, Ops() as ops:
                    step()
                names = [name for name in ops.names if name not in ("_local_scalar_dense", "detach", "device")]
                found.append((names, live.live_bytes, live.peak_bytes))
        return found

    real = steps(contextlib.nullcontext())
    assert set(SCALING) < {*real[1][0]}
    assert steps(FakeDevice(load_profile("cpu"))) == real


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, torch.cuda.amp.GradScaler])
@pytest.mark.filterwarnings("ignore:.*GradScaler.args.*deprecated:FutureWarning")
def test_a_scaler_for_cuda_is_enabled_where_cuda_is_simulated(kind: type[torch.amp.GradScaler]) -> None:
    with FakeDevice(load_profile("h100")):
        scaler = kind()
        assert scaler.is_enabled()
        model = layers().to("cuda")
        with Ops() as ops:
            step_of(model, scaler, "cuda")()
        assert scaler.state_dict()["scale"] == 2.0**16
    assert set(SCALING) < {*ops.names}
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match="CUDA is not available"):
            assert not kind().is_enabled()


def test_a_scaler_that_is_off_scales_nothing() -> None:
    with FakeDevice(load_profile("h100")), Ops() as ops:
        step_of(layers().to("cuda"), torch.amp.GradScaler("cuda", enabled=False), "cuda")()
    assert not {*SCALING} & {*ops.names}


@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_scaler_of_the_program_is_after_a_plan_as_before(num_steps: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    model = layers()
    step = step_of(model, scaler)
    for _ in range(num_steps):
        step()
    before, scale = copy.deepcopy(scaler.state_dict()), scaler._scale

    def make() -> tuple[nn.Module, Callable[[], None]]:
        absent = layers().to("cuda")
        return absent, step_of(absent, scaler, "cuda")

    plan = graphckpt.plan(make, device="h100", memory_budget="max", candidates=["full"])
    assert plan.predicted_peak_bytes > 0
    assert scaler.state_dict() == before
    assert scaler._scale is scale
    step()
    assert scaler._growth_tracker == num_steps + 1


def test_a_simulated_update_of_a_graph_scales_its_gradients() -> None:
    class Step(graphckpt.Graph):
        def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
            super().__init__()
            self.model = layers()
            self.config.enable_amp(dtype=torch.float16)
            self.set_grad_scaler(scaler)
            self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss = self.model(x).sum()
            loss.backward()
            return loss

    def seconds(scaler: torch.amp.GradScaler | None) -> float:
        step, x = Step(scaler), torch.zeros(8, WIDTH)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # float16 without a scaler
            return step.plan(x, memory_budget="max", device="h100", select="model.*").predicted_step_seconds

    scaler = torch.amp.GradScaler("cpu")
    # The loss and its gradient are multiplied; the gradients unscaled, by the reciprocal in float64; the scale updated.
    assert seconds(scaler) > seconds(None) + 5 * load_profile("h100").launch_seconds
    assert scaler._scale is None


def test_fully_sharded_gradients_are_unscaled() -> None:
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    cluster = FakeCluster(4)
    with cluster, FakeDevice(load_profile("h100"), cluster=cluster), Ops() as ops:
        model = layers().to("cuda")
        for module in (*model, model):
            fully_shard(module, mesh=init_device_mesh("cuda", (4,)))
        step_of(model, torch.amp.GradScaler("cuda"), "cuda")()
    assert set(SCALING) < {*ops.names}


def test_a_fused_optimizer_writes_the_gradients_that_it_unscales() -> None:
    weight = torch.zeros(WIDTH, device="meta")
    grads, steps = [[torch.zeros_like(weight)] for _ in range(2)], [torch.zeros(())]
    found = []
    for scale in (None, torch.ones(())):
        kwargs = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False}
        kwargs |= {"maximize": False, "grad_scale": scale, "found_inf": None}
        args = ([weight], grads[0], grads[1], [torch.zeros_like(weight)], [], steps)
        found.append(moved_bytes(torch.ops.aten._fused_adamw_.default, args, kwargs, None))
    assert found[1] - found[0] == 4 * WIDTH


def noting(names: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        names.append(name)
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_step_of_a_config_is_scaled_and_clipped_as_the_trainer_does(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    for owner, name in ((torch, SCALING[0]), (torch.linalg, "vector_norm")):
        monkeypatch.setattr(owner, name, noting(names, name, getattr(owner, name)))
    words = [*SMALL, f"train.amp.dtype={dtype}", "train.amp.enabled=true"]
    with fake_steps_from("configs/quickstart.py", words, device="h200") as steps:
        steps.step(2).step.run()
    assert {*names} == {"vector_norm", *(SCALING[:1] if dtype == "float16" else ())}
