"""The loop, its hooks, parameter groups and learning rates."""

from __future__ import annotations

import io
import itertools
import json
import math
import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from helpers.small_run import Calls
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from graphckpt.train.hooks import log
from graphckpt.train.hooks.evaluate import EvalHook
from graphckpt.train.hooks.log import LogHook, device_memory, process_memory
from graphckpt.train.hooks.metrics import MetricsHook
from graphckpt.train.loop import HookBase, Loop, TrainError, attribute_errors
from graphckpt.train.optim import get_default_optimizer_params, warmup_cosine_lr
from graphckpt.train.output import Report
from graphckpt.train.tasks import CausalLM


class Written(HookBase):
    def __init__(self) -> None:
        self.calls = []

    def before_train(self, loop: Loop) -> None:
        self.calls.append("before_train")

    def before_step(self, loop: Loop) -> None:
        self.calls.append(f"before_step {loop.done}")

    def after_step(self, loop: Loop) -> None:
        self.calls.append(f"after_step {loop.done}")

    def after_train(self, loop: Loop) -> None:
        self.calls.append("after_train")


def _report(log_file: Path | None = None) -> Report:
    return Report(Console(file=io.StringIO()), log_file)


def _log_hook(**more: Any) -> LogHook:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    fields = {"device": torch.device("cpu"), "log_period": 2, "batch_size": 3, "seq_length": 5}
    return LogHook(optimizer, **{**fields, **more})


def _loss(iteration: int) -> dict[str, Tensor]:
    return {"total_loss": torch.tensor(float(iteration))}


def test_hooks_run_around_every_step() -> None:
    hook = Written()
    Loop(_loss, train_iter=2, report=_report(), hooks=[hook]).run()
    steps = ["before_step 0", "after_step 1", "before_step 1", "after_step 2"]
    assert hook.calls == ["before_train", *steps, "after_train"]


def test_first_interrupt_ends_after_the_step_and_the_handler_is_restored() -> None:
    before = signal.getsignal(signal.SIGINT)
    hook = Written()

    def step(iteration: int) -> dict[str, Tensor]:
        if iteration == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return _loss(iteration)

    loop = Loop(step, train_iter=10, report=_report(), hooks=[hook])
    loop.run()
    assert (loop.done, loop.is_stopped) == (2, True)
    assert hook.calls[-2:] == ["after_step 2", "after_train"]
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupt_while_a_line_is_printed_prints_it_once() -> None:
    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            if "a line" in text and loop.done == 1:
                os.kill(os.getpid(), signal.SIGINT)
            return super().write(text)

    prints = Calls(after_step=lambda loop: loop.report.line(f"a line {loop.done}"))
    screen = Screen()
    loop = Loop(_loss, train_iter=10, report=Report(Console(file=screen)), hooks=[prints])
    loop.run()
    assert (loop.done, loop.is_stopped) == (1, True)
    assert screen.getvalue().count("a line 1") == 1


def test_second_interrupt_ends_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)

    def step(iteration: int) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("goes on")

    with pytest.raises(KeyboardInterrupt):
        Loop(step, train_iter=10, report=_report()).run()
    assert signal.getsignal(signal.SIGINT) is before


def test_log_holds_the_mean_since_the_line_before(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.json"
    hooks = [_log_hook(), MetricsHook(metrics)]
    report = _report(tmp_path / "log.txt")
    Loop(_loss, train_iter=5, report=report, hooks=hooks).run()
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [(row["iteration"], row["total_loss"]) for row in rows] == [(0, 0.0), (1, 1.0), (3, 2.5), (4, 4.0)]
    assert [row["consumed_samples"] for row in rows] == [3, 6, 12, 15]
    assert all(row["lr"] == 0.5 and row["tokens_per_second"] > 0 for row in rows)
    assert all(0 < row["rss_bytes"] <= row["peak_rss_bytes"] for row in rows)
    log = (tmp_path / "log.txt").read_text()
    assert log.count("samples/s") == 4
    assert "  iteration: 4/5  consumed_samples: 12  total_loss: 2.5000  time: " in log


def test_evaluation_weighs_by_tokens_and_restores_the_mode() -> None:
    model = nn.Dropout()
    seen = []

    def evaluate(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.append((model.training, torch.is_grad_enabled()))
        labels = batch["labels"].float()
        return {"loss": torch.stack([labels.sum(), torch.tensor(labels.numel())])}

    def batches() -> Iterator[tuple[dict[str, Tensor], bool]]:
        yield {"labels": torch.full((3, 5), 2.0)}, True
        yield {"labels": torch.full((1, 5), 6.0)}, True
        yield {"labels": torch.full((1, 5), 9.0)}, False  # runs for the sake of other processes, and does not count

    hook = EvalHook(evaluate, batches, CausalLM().metrics, model=model, eval_period=2)
    assert hook.measure() == {"eval_loss": 3.0, "eval_ppl": math.exp(3.0)}
    assert seen == [(False, False)] * 3
    assert model.training

    loop = Loop(_loss, train_iter=3, report=_report(), hooks=[hook])
    metrics = []
    loop._hooks += (Calls(after_step=lambda loop: metrics.append(loop.metrics)),)
    loop.run()
    assert [sorted(row) for row in metrics] == [[], ["eval_loss", "eval_ppl"], ["eval_loss", "eval_ppl"]]
    assert metrics[-1]["eval_ppl"] == math.exp(3.0)


def test_memory_counts_what_is_held() -> None:
    before = process_memory()["rss_bytes"]
    held = mmap.mmap(-1, 64 << 20)  # not a tensor: an allocator may have kept as many pages from an earlier test
    held.write(b"\1" * len(held))
    after = process_memory()["rss_bytes"]
    assert after - before > 0.9 * len(held)
    held.close()
    assert process_memory()["peak_rss_bytes"] > 0.99 * after  # the kernel sums its counters late


def test_parameter_groups() -> None:
    model = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3, bias=False))
    model[3].weight = model[0].weight  # shared: counts once
    model[2].bias.requires_grad_(False)
    groups = get_default_optimizer_params(model, weight_decay_bias=0.3, clip_grad_max_norm=2.0)
    assert [len(group["params"]) for group in groups] == [2, 1, 1]
    assert [group.get("weight_decay") for group in groups] == [None, 0.3, 0.0]
    assert all(group["clip_grad_max_norm"] == 2.0 and group["clip_grad_norm_type"] == 2.0 for group in groups)
    groups = get_default_optimizer_params(model, clip_grad_max_norm=None)
    assert [len(group["params"]) for group in groups] == [2, 2]
    assert "clip_grad_norm_type" not in groups[0]


def test_learning_rate_rises_then_falls() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = warmup_cosine_lr(optimizer, max_iter=20, warmup_iter=4, warmup_factor=0.5, alpha=0.1)
    rates = []
    for _ in range(21):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[:5] == [1.0, 1.25, 1.5, 1.75, 2.0]
    assert rates[12] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert rates[20] == pytest.approx(0.2)
    assert all(earlier >= later for earlier, later in itertools.pairwise(rates[4:]))


class FakeEvent:
    """Stands for an event of a device: notes when it is recorded and waited for."""

    seen: ClassVar[list[str]] = []

    def __init__(self, device: torch.device) -> None:
        self.name = f"event {sum('recorded' in text for text in self.seen)} of {device.type}"

    def record(self) -> None:
        self.seen.append(f"{self.name} recorded")

    def synchronize(self) -> None:
        self.seen.append(f"{self.name} awaited")


@pytest.fixture
def device_events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A device whose tensors are the CPU's: what is launched, recorded and waited for is noted."""
    monkeypatch.setattr(FakeEvent, "seen", [])
    monkeypatch.setattr(torch, "Event", FakeEvent)
    return FakeEvent.seen


def _late_loop(hooks: list[HookBase], events: list[str], report: Report, **more: Any) -> Loop:
    def step(iteration: int) -> dict[str, Tensor]:
        events.append(f"step {iteration}")
        return _loss(iteration)

    return Loop(step, report=report, hooks=hooks, **more)


def test_on_a_device_a_line_is_read_one_period_late_and_keeps_its_number(
    tmp_path: Path, device_events: list[str]
) -> None:
    metrics = tmp_path / "metrics.json"
    hooks = [_log_hook(device=torch.device("xpu"), log_period=2), MetricsHook(metrics)]
    report = _report(tmp_path / "log.txt")
    _late_loop(hooks, device_events, report, train_iter=7).run()
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [(row["iteration"], row["total_loss"]) for row in rows] == [(0, 0.0), (1, 1.0), (3, 2.5), (5, 4.5), (6, 6.0)]
    assert [row["consumed_samples"] for row in rows] == [3, 6, 12, 18, 21]
    # What was recorded after iteration 3 is waited for after 5 has been launched, and so on.
    first_wait = {number: device_events.index(f"event {number} of xpu awaited") for number in range(5)}
    assert device_events.index("step 3") < first_wait[1] < device_events.index("step 4")
    assert device_events.index("step 5") < first_wait[2] < device_events.index("step 6")
    assert device_events.index("event 3 of xpu recorded") < first_wait[2]
    assert "  iteration: 4/7  consumed_samples: 12  total_loss: 2.5000  time: " in (tmp_path / "log.txt").read_text()


def test_a_line_that_is_not_read_yet_survives_a_snapshot_and_a_stop(tmp_path: Path, device_events: list[str]) -> None:
    def losses(name: str) -> list[tuple[int, float]]:
        rows = (json.loads(line) for line in (tmp_path / name).read_text().splitlines())
        return [(row["iteration"], row["total_loss"]) for row in rows]

    def stop(loop: Loop) -> None:
        if loop.done == 4:
            resumed.load_state_dict(hook.state_dict())
            assert losses("stopped") == [(0, 0.0), (1, 1.0)]
            loop._is_asked = True

    hook, resumed = (_log_hook(device=torch.device("xpu")) for _ in range(2))
    hooks = [hook, MetricsHook(tmp_path / "stopped"), Calls(after_step=stop)]
    _late_loop(hooks, device_events, _report(), train_iter=6).run()
    assert losses("stopped") == [(0, 0.0), (1, 1.0), (3, 2.5)]
    hooks = [resumed, MetricsHook(tmp_path / "resumed")]
    _late_loop(hooks, device_events, _report(), train_iter=6, start_iter=4).run()
    assert losses("resumed") == [(3, 2.5), (5, 4.5)]


def test_seconds_that_a_hook_waits_for_the_device_are_the_steps(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.json"
    hooks = [_log_hook(log_period=4), MetricsHook(metrics), Calls(after_step=lambda loop: loop.synchronize())]
    Loop(_loss, train_iter=4, report=_report(), hooks=hooks, synchronize=lambda: time.sleep(0.05)).run()
    row = json.loads(metrics.read_text().splitlines()[-1])
    assert 0.05 <= row["time"] < 0.1


@pytest.mark.parametrize("has_driver", [True, False])
def test_memory_of_a_cuda_device_is_allocated_reserved_and_used(
    monkeypatch: pytest.MonkeyPatch, has_driver: bool
) -> None:
    names = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "device_memory_used")
    for number, name in enumerate(names):
        monkeypatch.setattr(torch.cuda, name, lambda device, number=number: number)
    monkeypatch.setattr(log, "find_spec", lambda name: object() if has_driver and name == "pynvml" else None)
    keys = ["cuda_bytes", "peak_cuda_bytes", "cuda_reserved_bytes", "peak_cuda_reserved_bytes"]
    keys += ["cuda_used_bytes"] * has_driver
    assert device_memory(torch.device("cuda", 0)) == {key: number for number, key in enumerate(keys)}
    assert device_memory(torch.device("cpu")) == {}


def _out_of_time() -> None:
    raise RuntimeError("the tokenizer's server timed out")


class _Slow(Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        time.sleep(30)
        return index


@pytest.mark.parametrize(
    "fails", [_out_of_time, lambda: next(iter(DataLoader(_Slow(), num_workers=1, timeout=0.1)))], ids=["own", "data"]
)
def test_an_error_of_code_that_is_out_of_time_is_not_one_of_another_process(fails: Callable[[], object]) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        expected = r"^data: reading a batch failed, RuntimeError: .* timed out"
        with pytest.raises(TrainError, match=expected), attribute_errors("data", "reading a batch"):
            fails()
    finally:
        dist.destroy_process_group()
