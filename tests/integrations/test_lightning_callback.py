"""One callback in Lightning's Trainer: same bits, bytes that fall, with one device and under DDP, off at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.layer_stacks import stack_of
from helpers.modules import as_module
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from graphckpt.integrations.lightning import GraphckptCallback

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"
    ),  # Lightning's call
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers:UserWarning"),
]
LAYERS = 4
RUNS: dict[nn.Module, list[int]] = {}  # of each layer's first linear; a block would take a list of its own back


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))


@as_module(lambda width: {"body": mlp(width)})
def Layer(self: Any, x: Tensor) -> Tensor:
    return x + self.body(x)


class Regression(LightningModule):
    def __init__(self, batch: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.batch = batch
        self.net = nn.Sequential(nn.Linear(8, 16), *stack_of(lambda: Layer(16), LAYERS), nn.Linear(16, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(3 * self.batch, 8, generator=generator)
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=self.batch)


def fit(
    folder: Path,
    *callbacks: GraphckptCallback,
    strategy: str | DDPStrategy = "auto",
    devices: int = 1,
    batch: int = 8,
    kind: Any = None,
    **more: Any,
) -> Regression:
    module: Regression = (kind or Regression)(batch)
    RUNS[module] = [0] * LAYERS
    for number in range(LAYERS):

        def count(*_: object, number: int = number) -> None:
            RUNS[module][number] += 1

        module.net[number + 1].body[0].register_forward_pre_hook(count)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    torch.manual_seed(3)
    Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        callbacks=list(callbacks),
        default_root_dir=folder,
        log_every_n_steps=1,
        **{"logger": False, "max_epochs": 1, **quiet, **more},
    ).fit(module)
    return module


def differences(ours: nn.Module, plain: nn.Module) -> list[str]:
    wanted = plain.state_dict()
    return [name for name, value in ours.state_dict().items() if not torch.equal(value, wanted[name])]


@pytest.fixture
def ddp() -> Any:
    """DDP over the one process of this test; each fit takes one."""
    yield lambda: DDPStrategy(process_group_backend="gloo")
    dist.destroy_process_group()


def test_one_line_in_lightning_saves_bytes_and_changes_no_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = fit(tmp_path)
    callback = GraphckptCallback(select=Layer)
    ours = fit(tmp_path, callback, logger=CSVLogger(tmp_path))
    assert differences(ours, plain) == []
    assert (RUNS[plain], RUNS[ours]) == ([3] * LAYERS, [6] * LAYERS)
    seen = callback.explanation
    assert seen.bytes_after < seen.bytes_before / 3
    assert seen.peak_bytes is not None
    assert [row.reruns for row in seen.rows if row.rule == "full"] == [1] * LAYERS
    assert f"policies act on {LAYERS} blocks" in capsys.readouterr().out
    written = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text()
    assert "graphckpt/kept_bytes" in written
    assert str(float(seen.bytes_after)) in written
    assert not any("forward" in vars(m) for m in ours.modules())


def test_the_same_line_under_ddp(tmp_path: Path, ddp: Any) -> None:
    plain = fit(tmp_path, strategy=ddp())
    callback = GraphckptCallback(rule=None, policies={"net.1": True, "re:net\\.[23]": "selective"})
    ours = fit(tmp_path, callback, strategy=ddp())
    assert differences(ours, plain) == []
    assert RUNS[ours] == [6, 6, 6, 3]
    assert callback.explanation.bytes_saved > 0


def test_a_memory_budget_is_planned_for_in_the_first_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = fit(tmp_path, batch=256, max_epochs=3)
    callback = GraphckptCallback(select="Layer", memory_budget=0.6, report="table", plot=str(tmp_path / "step.png"))
    ours = fit(tmp_path, callback, batch=256, max_epochs=3)
    assert differences(ours, plain) == []
    plan, seen = callback.plan, callback.explanation
    assert plan.predicted_peak_bytes <= plan.budget_bytes < plan.plain_peak_bytes
    assert seen.peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.03)
    assert seen.bytes_after < seen.bytes_before
    printed = capsys.readouterr().out
    assert "graphckpt: plan\n" in printed
    assert "kept for backward: " in printed
    assert (tmp_path / "step.png").stat().st_size > 1000
    assert not any("forward" in vars(m) for m in ours.modules())


class ByHand(Regression):
    """Has two optimizers, which it steps itself, and logs."""

    def __init__(self, batch: int = 8) -> None:
        super().__init__(batch)
        self.automatic_optimization = False
        self.num_steps = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        self.num_steps += 1
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        return torch.optim.AdamW(self.net[:3].parameters()), torch.optim.SGD(self.net[3:].parameters())


@pytest.mark.parametrize(("kind", "more"), [(ByHand, {}), (Regression, {"accumulate_grad_batches": 2})])
def test_a_budget_runs_no_step_twice(tmp_path: Path, kind: type[Regression], more: dict[str, Any]) -> None:
    callback = GraphckptCallback(select="Layer", memory_budget="min", report="table")
    plain, ours = (
        fit(tmp_path, *callbacks, batch=64, kind=kind, max_epochs=3, **more) for callbacks in ([], [callback])
    )
    assert differences(ours, plain) == []
    assert getattr(ours, "num_steps", 0) == getattr(plain, "num_steps", 0)
    assert callback.plan.policies
    plan = callback.plan  # its peak is that of an earlier update: Lightning keeps what is logged
    assert callback.explanation.peak_bytes <= 1.001 * plan.predicted_peak_bytes < plan.plain_peak_bytes


@pytest.mark.parametrize(("num_batches", "accumulated", "has_states"), [(1, 1, False), (3, 2, True)])
def test_the_measured_batch_is_one_with_optimizer_states_if_there_is_one(
    tmp_path: Path, num_batches: int, accumulated: int, has_states: bool
) -> None:
    callback = GraphckptCallback(select="Layer")
    logger = CSVLogger(tmp_path)
    fit(tmp_path, callback, logger=logger, limit_train_batches=num_batches, accumulate_grad_batches=accumulated)
    weights = sum(p.nbytes for p in Regression().parameters())
    assert (callback.explanation.static_bytes >= 3 * weights) == has_states
    assert (Path(logger.log_dir) / "metrics.csv").read_text().count("graphckpt/peak_bytes") == 1


def test_an_error_takes_the_policies_off(tmp_path: Path) -> None:
    class Failing(Callback):
        def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
            self.module = pl_module
            raise ZeroDivisionError

    failing, callback = Failing(), GraphckptCallback(select="Layer")
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, callback, failing)
    assert not any("forward" in vars(m) for m in failing.module.modules())
