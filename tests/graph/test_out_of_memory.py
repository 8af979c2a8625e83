"""A Graph that runs out of memory: the step is replanned and repeated, and no bit of the training changes."""

from __future__ import annotations

import gc
import random
import warnings

import pytest
import torch
from helpers.memory_limit import MemoryLimit
from torch import nn

from graphckpt import Graph

pytestmark = pytest.mark.filterwarnings("default:.*memory ran out; the step is repeated")
FAILED = 2  # the step that runs out of memory, of STEPS
STEPS = 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(32, 128), nn.Linear(128, 32), nn.Dropout(0.1)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x):
        return x + self.norm(self.drop(self.down(torch.tanh(self.up(x)))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.last = nn.Linear(32, 4)
        self.num_forwards = 0
        self.seen = []

    def forward(self, x):
        self.num_forwards += 1
        self.seen.append(random.random())
        self.mean = x.detach().mean()
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Step(Graph):
    def __init__(self, *, num_micro_batches=1, has_scaler=False, mode="replan"):
        super().__init__()
        self.model = Net()
        self.num_builds = 0
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.add_optimizer(optimizer, lr_sch=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n))
        self.config.set_gradient_accumulation_steps(num_micro_batches)
        self.config.measure = False
        self.config.on_out_of_memory = mode
        if has_scaler:
            self.set_grad_scaler(torch.amp.GradScaler("cpu", init_scale=16.0))

    def build(self, x):
        self.num_builds += 1
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


X = torch.randn(512, 16, generator=torch.Generator().manual_seed(2))


def made(**settings):
    torch.manual_seed(0)
    random.seed(0)
    step = Step(**settings)
    torch.manual_seed(1)
    return step


def run(step, limit=None):
    """Returns all that training has changed, the limit, and the live bytes around the step that is limited."""
    losses, memory, levels = [], MemoryLimit(), []
    memory.track([X, *step.model.origin.parameters(), *step.model.origin.buffers()])
    for number in range(STEPS):
        if number == FAILED:
            memory.track(t for o in step._update.optimizers for s in o.state.values() for t in s.values())
            gc.collect()
            levels.append(memory.live_bytes)
            memory.limit = limit
            memory.peak_bytes = 0
            with memory:
                losses.append(step(X))
            memory.limit = None
            gc.collect()
            levels.append(memory.live_bytes)
        else:
            losses.append(step(X))
    model = step.model.origin
    states = [t for o in step._update.optimizers for s in o.state.values() for t in s.values()]
    random_state = [torch.get_rng_state(), torch.tensor(random.random())]
    numbers = [
        model.num_forwards, step.num_builds, step._update.num_steps, step._update.optimizers[0].param_groups[0]["lr"],
        *model.seen, *(s.state_dict()["last_epoch"] for s in step._update.schedulers),
        None if step._update.scaler is None else step._update.scaler.state_dict()["scale"],
    ]  # fmt: skip
    tensors = [*losses, *model.parameters(), *model.buffers(), model.mean, *states, *random_state]
    return tensors, numbers, memory, levels


def is_same(one, other):
    return one[1] == other[1] and all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_micro_batches": 4}, {"num_micro_batches": 2, "has_scaler": True}],
    ids=["plain", "accumulation", "scaler"],
)
def test_training_is_the_same_wherever_memory_runs_out(settings):
    expected = run(made(**settings))
    at_rest, _ = expected[3]
    peak = expected[2].peak_bytes
    num_replanned = 0
    for share in (0.97, 0.8, 0.65):
        step = made(**settings)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            got = run(step, at_rest + int(share * (peak - at_rest)))
        assert is_same(got, expected), share
        assert got[2].num_raised == 1
        text, *others = [str(w.message) for w in seen]
        assert not others, text
        assert "4x keep ->" in text
        assert "\n" not in text
        num_replanned += any(layer.config.activation_checkpointing for layer in step.model.layers)
    assert num_replanned == 3


def test_off_by_default():
    assert made(mode="raise").config.on_out_of_memory == Graph().config.on_out_of_memory == "raise"
    step = made(mode="raise")
    with pytest.raises(torch.OutOfMemoryError, match="tried to allocate") as error:
        run(step, 200_000)
    assert not hasattr(error.value, "__notes__")
