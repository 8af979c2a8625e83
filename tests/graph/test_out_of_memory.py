"""A Graph that runs out of memory: the step is replanned and repeated, and no bit of the training changes."""

from __future__ import annotations

import gc
import random
import re
import resource
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from helpers.memory_limit import MemoryLimit, limited_address_space
from torch import nn

from graphckpt import ConfigError, Graph
from graphckpt.blocks.forward import policy_of
from graphckpt.graph import out_of_memory
from graphckpt.graph.out_of_memory import StepBackup, is_out_of_memory
from graphckpt.graph.step import StepCall
from graphckpt.planning import options

pytestmark = pytest.mark.filterwarnings("default:.*memory ran out; the step is repeated")


@pytest.fixture(autouse=True)
def _limited() -> Iterator[None]:
    with limited_address_space():
        yield


FAILED = 2  # the step that runs out of memory, of STEPS
STEPS = 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(32, 128), nn.Linear(128, 32), nn.Dropout(0.1)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.drop(self.down(torch.tanh(self.up(x)))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.last = nn.Linear(32, 4)
        self.num_forwards = 0
        self.seen = []
        self.moves_0 = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        self.seen.append(random.random())
        moves = self.__dict__.pop(f"moves_{self.num_forwards - 1}")  # under another name, and no more attributes
        moves.append(self.seen[-1])
        setattr(self, f"moves_{self.num_forwards}", moves)
        self.mean = x.detach().mean()
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Step(Graph):
    def __init__(self, *, num_micro_batches: int = 1, has_scaler: bool = False, mode: str = "replan") -> None:
        super().__init__()
        self.model = Net()
        self.num_builds = 0
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.add_optimizer(optimizer, lr_sch=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n))
        self.config.set_gradient_accumulation_steps(num_micro_batches)
        self.config.measure = False
        self.config.on_out_of_memory = mode
        self.config.plan_options = {"candidates": ["full"]}  # fewer runs: what is chosen does not matter here
        if has_scaler:
            self.set_grad_scaler(torch.amp.GradScaler("cpu", init_scale=16.0))

    def build(self, x: torch.Tensor) -> torch.Tensor:
        self.num_builds += 1
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


Outcome = tuple[list[torch.Tensor], list[object], MemoryLimit, int]
"""Tensors and numbers that training has changed, the limit, and the live bytes before the limited step."""
X = torch.randn(512, 16, generator=torch.Generator().manual_seed(2))


def made(**settings: Any) -> Step:
    torch.manual_seed(0)
    random.seed(0)
    step = Step(**settings)
    torch.manual_seed(1)
    return step


def run(step: Step, limit: int | None = None) -> Outcome:
    """Returns all that training has changed, the limit, and the live bytes before the step that is limited."""
    losses, memory = [], MemoryLimit()
    memory.track([X, *step.model.origin.parameters(), *step.model.origin.buffers()])
    for number in range(STEPS):
        if number == FAILED:
            memory.track(t for o in step._update.optimizers for s in o.state.values() for t in s.values())
            gc.collect()
            at_rest = memory.live_bytes
            memory.limit = limit
            memory.peak_bytes = 0
            with memory:
                losses.append(step(X))
            memory.limit = None
        else:
            losses.append(step(X))
    model = step.model.origin
    states = [t for o in step._update.optimizers for s in o.state.values() for t in s.values()]
    random_state = [torch.get_rng_state(), torch.tensor(random.random())]
    numbers = [
        model.num_forwards, step.num_builds, step._update.num_steps, step._update.optimizers[0].param_groups[0]["lr"],
        *model.seen, *getattr(model, f"moves_{model.num_forwards}"),
        *(s.state_dict()["last_epoch"] for s in step._update.schedulers),
        None if step._update.scaler is None else step._update.scaler.state_dict()["scale"],
    ]  # fmt: skip
    tensors = [*losses, *model.parameters(), *model.buffers(), model.mean, *states, *random_state]
    return tensors, numbers, memory, at_rest


def limit_at(share: float, of_run: Outcome) -> int:
    """Returns a limit at a share of the bytes by which the step raises the live bytes."""
    _, _, memory, at_rest = of_run
    return at_rest + int(share * (memory.peak_bytes - at_rest))


def is_same(one: Outcome, other: Outcome) -> bool:
    return one[1] == other[1] and all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        ({}, (0.97, 0.8, 0.65)),
        ({"num_micro_batches": 4}, (0.8,)),
        ({"num_micro_batches": 2, "has_scaler": True}, (0.97,)),
    ],
    ids=["plain", "accumulation", "scaler"],
)
def test_training_is_the_same_wherever_memory_runs_out(settings: dict[str, Any], shares: tuple[float, ...]) -> None:
    expected = run(made(**settings))
    num_replanned = 0
    for share in shares:
        step = made(**settings)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            got = run(step, limit_at(share, expected))
        assert is_same(got, expected), share
        assert got[2].num_raised == 1
        text, *others = [str(w.message) for w in seen]
        assert not others, text
        assert "4x keep ->" in text
        assert "\n" not in text
        num_replanned += any(layer.config.activation_checkpointing for layer in step.model.layers)
    assert num_replanned == len(shares)


def test_off_by_default() -> None:
    assert made(mode="raise").config.on_out_of_memory == Graph().config.on_out_of_memory == "raise"
    step = made(mode="raise")
    with pytest.raises(torch.OutOfMemoryError, match="tried to allocate") as error:
        run(step, 200_000)
    assert not hasattr(error.value, "__notes__")


def made_selective() -> Step:
    step = made()
    for layer in step.model.layers:
        layer.config.activation_checkpointing = "selective"
    return step


def test_memory_runs_out_in_a_recomputation() -> None:
    expected = run(made())
    limit = limit_at(0.85, run(made_selective()))
    with pytest.warns(UserWarning, match=r"repeated: 4x selective\(matmul\+attention\) -> "):
        got = run(made_selective(), limit)
    assert is_same(got, expected)
    assert {"backward", "_recompute"} <= got[2].functions


def test_second_error_is_the_first_one_with_a_note_and_nothing_stays_alive() -> None:
    plain = made()
    expected = [plain(X) for _ in range(STEPS)]
    step, memory = made(), MemoryLimit()
    memory.track([X, *step.model.origin.parameters(), *step.model.origin.buffers()])
    for _ in range(FAILED):
        step(X)
    memory.track(t for o in step._update.optimizers for s in o.state.values() for t in s.values())
    memory.track([step.model.origin.mean])
    before = memory.live_bytes
    memory.limit = before + 100_000
    with pytest.warns(UserWarning, match="repeated"), memory, pytest.raises(torch.OutOfMemoryError) as error:
        step(X)
    assert memory.num_raised == 2
    where, note = error.value.__notes__
    assert "x + self.norm" in where
    assert "memory ran out again after replanning: 4x keep -> " in note
    assert "fix: a smaller batch" in note
    del error  # its frame holds the backup of the state
    gc.collect()
    assert memory.live_bytes <= before
    assert [p.grad for p in step.model.origin.parameters()] == [None] * len(list(step.model.origin.parameters()))
    assert all(torch.equal(step(X), loss) for loss in expected[FAILED:])


def test_lowest_plan_is_tried_before_the_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process takes memory that was free when the first plan was made."""
    expected = run(made())
    monkeypatch.setattr(options, "available_bytes", lambda *_: limit_at(0.85, expected))
    with pytest.warns(UserWarning, match="repeated: ") as caught:
        got = run(made(), limit_at(0.55, expected))
    assert is_same(got, expected)
    texts = [str(warning.message) for warning in caught if "repeated: " in str(warning.message)]
    assert [text.endswith("the lowest") for text in texts] == [False, True]
    assert got[2].num_raised == 2


def test_plan_is_at_most_the_memory_budget() -> None:
    step = made()
    step.config.memory_budget = 0.9
    while step._auto_plan is None or not step._auto_plan._live.is_settled:
        step(X)
    planned = sum(bool(layer.config.activation_checkpointing) for layer in step.model.layers)
    with MemoryLimit() as memory:
        step(X)
    limit = memory.peak_bytes - 1000
    with MemoryLimit(limit) as memory, pytest.warns(UserWarning, match="repeated"):
        step(X)
    assert memory.num_raised == 1
    assert sum(bool(layer.config.activation_checkpointing) for layer in step.model.layers) > planned
    policies = [layer.config.fields() for layer in step.model.layers]
    step(X)
    assert [layer.config.fields() for layer in step.model.layers] == policies


@pytest.mark.parametrize("failed", [1, 2])
def test_memory_runs_out_while_a_graph_plans(failed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan for the memory that is free ends the planning, and stays."""
    monkeypatch.setitem(globals(), "FAILED", failed)
    expected = run(made())
    step = made()
    step.config.memory_budget = 0.9
    step.config.plan_options = {"progress": False}
    with pytest.warns(UserWarning, match="repeated: "):
        got = run(step, limit_at(0.55, expected))
    assert is_same(got, expected)
    assert got[2].num_raised > 0
    assert step._auto_plan._live is None
    assert step._step.metering is None
    assert all(policy_of(module) is None for module in step.model.origin.modules())
    policies = [layer.config.fields() for layer in step.model.layers]
    step(X)
    assert [layer.config.fields() for layer in step.model.layers] == policies


def test_error_in_the_update_says_that_it_cannot_be_undone() -> None:
    step = made()
    step(X)

    def run_out(optimizer: Any, *_: object) -> None:
        optimizer.param_groups[0]["params"][0].data.add_(1)
        raise MemoryError("no room")

    step._update.optimizers[0].register_step_pre_hook(run_out)
    with pytest.raises(MemoryError) as error:
        step(X)
    assert error.value.__notes__ == [
        f"{step.name}: not replanned, since the update of the parameters had begun · fix: a smaller batch"
    ]


def test_inputs_may_be_inference_tensors() -> None:
    step = made()
    step(X)
    with torch.inference_mode():
        x = X.clone()
    backup = StepBackup(step._step, StepCall(vars(step), step.build, (x,), {}))
    step._step.update.has_begun = False  # as before the first step
    assert backup.lasting_change() is None
    with torch.no_grad():
        next(step.model.origin.parameters()).add_(1)
    assert backup.lasting_change() == "the step had modified a parameter or an input in place"


def test_expanded_buffers_and_those_of_later_children_are_restored() -> None:
    class Counting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    step = made()
    step(X)
    model = step.model.origin
    model.first.counter = Counting()  # of a module that had no children
    model.first.counter.register_buffer("count", torch.zeros(3))
    model.last.register_buffer("scale", torch.ones(1).expand(4))
    backup = StepBackup(step._step, StepCall(vars(step), step.build, (X,), {}))
    model.first.counter.count += 1
    model.last.scale.data[0] = 2
    backup.restore()
    assert model.first.counter.count.tolist() == [0, 0, 0]
    assert model.last.scale.tolist() == [1, 1, 1, 1]
    assert step.verify(X)


def test_children_that_a_failed_step_has_made_are_removed() -> None:
    step = made()
    step(X)
    model = step.model.origin
    backup = StepBackup(step._step, StepCall(vars(step), step.build, (X,), {}))
    first, names = model.first, list(model._modules)
    model.first = nn.Identity()
    model.another = nn.Identity()
    backup.restore()
    assert list(model._modules) == names
    assert model.first is first


def test_input_that_was_modified_in_place_cannot_be_repeated() -> None:
    class InPlace(Step):
        def build(self, x: torch.Tensor) -> NoReturn:
            x.add_(1)
            raise MemoryError("no room")

    with pytest.raises(MemoryError) as error:
        InPlace()(X.clone())
    assert "not replanned, since the step had modified a parameter or an input in place" in error.value.__notes__[0]


def test_step_that_reads_values_cannot_be_planned_and_raises_the_error() -> None:
    class Reads(Step):
        def build(self, x: torch.Tensor) -> None:
            if int(x.argmax()) >= 0:
                raise MemoryError("no room")

    step = Reads()
    with pytest.raises(MemoryError, match="no room") as error:
        step(X)
    assert re.search(r"not replanned: the step \(.*, line \d+\) reads the value of a tensor", error.value.__notes__[1])
    assert not any(t.grad is not None or type(t) is not nn.Parameter for t in step.model.origin.parameters())


def test_several_processes_cannot_replan(monkeypatch: pytest.MonkeyPatch) -> None:
    step = made()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match=r"on_out_of_memory: expected one process, got a process group of 2 ranks"):
        step(X)


def test_without_a_limit_no_step_is_backed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_of_memory, "StepBackup", None)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **how: None)
    monkeypatch.setattr(out_of_memory, "_grants_no_more", lambda: False)
    step = made()
    step(X)
    with pytest.raises(torch.OutOfMemoryError) as error:
        run(step, 200_000)
    (note,) = error.value.__notes__
    assert note.startswith(f"{step.name}: not replanned: this process has no memory limit")
    assert note.endswith("fix: a smaller batch, or a limit (ulimit -v)")


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_each_limit_of_a_process_makes_allocations_fail(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    # of a CUDA build, whose device is not there
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(out_of_memory, "_grants_no_more", lambda: False)
    limits = {getattr(resource, limit): (2**46, resource.RLIM_INFINITY)}
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits.get(which, unlimited))
    assert out_of_memory.raises_out_of_memory()
    limits.clear()
    assert not out_of_memory.raises_out_of_memory()


def test_settings_are_checked() -> None:
    expected = r"on_out_of_memory: expected 'raise' or 'replan', got 'replann' · did you mean 'replan'\?"
    with pytest.raises(ConfigError, match=expected):
        made(mode="replann")


@pytest.mark.parametrize(
    "text",
    [
        "DefaultCPUAllocator: can't allocate memory",
        "not enough memory",
        "std::bad_alloc",
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    ],
)
def test_errors_of_allocators_are_known(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(ValueError(text))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of the address space")
def test_limit_of_the_address_space() -> None:
    script = Path(__file__).parents[1] / "helpers" / "address_space.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout == "same\n", done.stderr
    assert "memory ran out; the step is repeated: 4x keep -> " in done.stderr
