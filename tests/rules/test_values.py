"""The value check: what a recomputation computes is compared with sketches of what the original forward has."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.layer_stacks import linear_layers, stack_of
from helpers.modules import as_module
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import SelectiveCheckpointContext

import graphckpt
from graphckpt import RecomputeError, Selective, Tiles
from graphckpt.blocks import is_recomputing
from graphckpt.blocks.functional import _sampler_of
from graphckpt.engine import mismatch, values
from graphckpt.engine.block import BlockContext
from graphckpt.engine.sampling import CallSampler, without_value_checks
from graphckpt.engine.values import Sketch, relative_differences, sketch_of, tolerance_of
from graphckpt.ledger.live_memory import StorageLog

D = 32
RULES: dict[str, Any] = {
    "full": True,
    "selective": Selective("matmul"),
    "disk": {"activation_checkpointing": True, "offload": "disk", "min_elements": 1},
}


class Around:
    """What a block reads beside its arguments, by routes that the engine does not see."""

    factor = 1.0
    noise = torch.zeros(D, D)
    order = torch.arange(D)
    generator = torch.Generator()
    local = threading.local()


@pytest.fixture(autouse=True)
def around() -> None:
    Around.factor = Around.local.factor = 1.0
    Around.noise = torch.zeros(D, D)
    Around.order = torch.arange(D)
    Around.generator.manual_seed(0)


def permute() -> None:
    Around.order = torch.tensor([1, 0, *range(2, D)])


FAULTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], object]]] = {
    "a global": (lambda x: x * Around.factor, lambda: setattr(Around, "factor", 2.0)),
    "a tensor through .data": (lambda x: x + Around.noise, lambda: Around.noise.data.fill_(0.5)),
    "a generator": (lambda x: x + torch.randn(x.shape, generator=Around.generator), lambda: None),
    "a permuted batch": (lambda x: x[Around.order], permute),
    "every value off by 1e-3": (lambda x: x * Around.factor, lambda: setattr(Around, "factor", 1.001)),
    "one in a thousand off by 0.1": (lambda x: x + Around.noise, lambda: Around.noise.data.view(-1)[99].fill_(0.1)),
    "a thread-local": (lambda x: x * Around.local.factor, lambda: setattr(Around.local, "factor", 2.0)),
    "one bool of a mask": (lambda x: x.masked_fill(Around.noise > 0, 0), lambda: Around.noise.data[3, 3].fill_(1.0)),
}


class Reader(nn.Module):
    """A block that reads something beside its arguments, in the middle of its forward."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, D), nn.Linear(D, D)
        self.reads = (read,)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.reads[0](self.up(x))))


def later_step(model: nn.Module, fault: Callable[[], object] = lambda: None) -> None:
    """A step with a change between forward and backward."""
    loss = model(torch.randn(D, D)).square().sum()
    fault()
    loss.backward()


def plain_step(model: nn.Module) -> None:
    model(torch.randn(D, D)).square().sum().backward()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", FAULTS)
def test_values_finds_planted_faults_in_any_call(name: str, rule: str) -> None:
    read, fault = FAULTS[name]
    model = nn.Sequential(Reader(lambda x: x), Reader(lambda x: x))
    fields = RULES[rule] if isinstance(RULES[rule], dict) else {"activation_checkpointing": RULES[rule]}
    with graphckpt.apply(model, {"1": fields}, determinism_check="values"):
        for _ in range(5):
            plain_step(model)
        model[1].reads = (read,)
        with pytest.raises(
            RecomputeError, match=r"^1: saved tensor \d+, saved by .* at test_values.py:\d+, (?s:.*)\n· fix: "
        ):
            later_step(model, fault)


@pytest.mark.parametrize("name", FAULTS)
def test_the_default_finds_planted_faults_in_the_learning_call(name: str) -> None:
    read, fault = FAULTS[name]
    model = nn.Sequential(Reader(read))
    with graphckpt.apply(model, {"0": True}), pytest.raises(RecomputeError, match="relative difference"):
        later_step(model, fault)


@pytest.mark.parametrize("check", ["none", "default"])
def test_calls_between_the_samples_are_not_checked(check: str) -> None:
    """By default those between the samples: this is what `limits.md` says."""
    model = nn.Sequential(Reader(lambda x: x * Around.factor))
    with graphckpt.apply(model, {"0": True}, determinism_check=check):
        for _ in range(3):
            plain_step(model)
        later_step(model, FAULTS["a global"][1])


def test_the_message_says_what_differs_and_by_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mismatch, "has_scripted_code", lambda: False)  # of tests before, which makes the text longer
    model = nn.Sequential(Reader(lambda x: x * Around.factor))
    with graphckpt.apply(model, {"0": True}), pytest.raises(RecomputeError) as caught:
        later_step(model, FAULTS["every value off by 1e-3"][1])
    text = str(caught.value)
    assert text.startswith("0: saved tensor 1, saved by torch.tanh at test_values.py:")
    assert "float32[32, 32]: expected the values of the original forward, got others" in text
    difference = float(text.partition("relative difference ")[2].partition(")")[0])
    assert 2e-4 < difference < 2e-3, "an estimate of how much the tensors differ"
    assert "is_recomputing()" in text
    assert [line.partition(":")[0] for line in text.splitlines()] == ["0", "· likely cause", "· fix"]
    assert max(len(line.split()) for line in text.splitlines()) < 60
    assert "destroy_process_group" not in text, "there are no other ranks"


def test_a_tensor_of_another_shape_is_the_error_that_it_was() -> None:
    model = nn.Sequential(Reader(lambda x: x[: len(Around.order)] * Around.factor))
    with graphckpt.apply(model, {"0": True}, determinism_check="values"):

        def fault() -> None:
            Around.order, Around.factor = Around.order[:-1], 2.0

        with pytest.raises(RecomputeError, match=r"expected float32\[32, 32\], got float32\[31, 32\]"):
            later_step(model, fault)


def test_none_compares_not_even_shapes() -> None:
    """As in PyTorch: backward may then fail by itself, or not."""
    calls: list[int] = []

    def read(x: Tensor) -> Tensor:
        calls.append(1)
        return x * torch.ones(D, D if len(calls) == 1 else 1)

    model = nn.Sequential(Reader(read))
    with graphckpt.apply(model, {"0": True}, determinism_check="none"):
        plain_step(model)
    calls.clear()
    with graphckpt.apply(model, {"0": True}), pytest.raises(RecomputeError, match="expected float32"):
        plain_step(model)


def test_a_forward_that_asks_may_differ_on_purpose() -> None:
    model = nn.Sequential(Reader(lambda x: x * (2.0 if is_recomputing() else 1.0)))
    with graphckpt.apply(model, {"0": True}, determinism_check="values"):
        plain_step(model)
    unasked = nn.Sequential(Reader(lambda x: x * Around.factor))
    with graphckpt.apply(unasked, {"0": True}), pytest.raises(RecomputeError):
        later_step(unasked, FAULTS["a global"][1])


# No false alarms


class Holds(nn.Module):
    def __init__(self, function: Callable[..., Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(modules)
        self.functions = (function,)

    def forward(self, x: Tensor) -> Tensor:
        return self.functions[0](x, *self.inner)


def twice(x: Tensor, norm: nn.Module) -> Tensor:
    """Moves the statistics of a norm before it is called with gradients."""
    with torch.no_grad():
        target = norm(x * 2)
    return norm(x) - 0.1 * target


def with_later_edit(x: Tensor) -> Tensor:
    """Saves a tensor without history, then modifies a copy of it in place."""
    scale = torch.full((D, D), 0.5)
    y = x * scale
    scale = scale.clone().add_(1)
    return y * scale


QUIET: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(D),
    "lstm, which has a workspace": lambda: Holds(lambda x, lstm: lstm(x.unsqueeze(0))[0][0], nn.LSTM(D, D)),
    "rrelu, which fills its noise later": nn.RReLU,
    "rrelu in evaluation, which leaves its noise unwritten": lambda: nn.RReLU().eval(),
    "batch norm, twice": lambda: Holds(twice, nn.BatchNorm1d(D)),
    "batch norm in evaluation": lambda: nn.BatchNorm1d(D).eval(),
    "rrelu in place, as the last op": lambda: Holds(lambda x: F.rrelu_(x * 1, training=True)),
    "dropout": lambda: nn.Dropout(0.5),
    "complex": lambda: Holds(lambda x: torch.fft.ifft(torch.fft.fft(x).tanh().conj() * (1 + 2j)).abs()),
    "negative view": lambda: Holds(lambda x: (torch.complex(x, x).conj().imag * x).sin()),
    "a huge expanded view": lambda: Holds(lambda x: x * (x[:1, :1].expand(2**10, D, D)[5] * x).sin()),
    "transposed": lambda: Holds(lambda x: (x.t() * x).t().sin()),
    "slices with gaps": lambda: Holds(lambda x: torch.cat([p.sin() * p for p in x.chunk(4, 1)], 1)),
    "nan": lambda: Holds(lambda x: (x * torch.where(x > 1, torch.nan, 1.0)).nan_to_num()),
    "infinite mask": lambda: Holds(lambda x: (x + torch.triu(torch.full((D, D), -torch.inf), 1)).softmax(-1)),
    "integers": lambda: Holds(lambda x, e: e(x.abs().long() + 2**20).expand(*x.shape, D), nn.Embedding(2**20 + 16, 1)),
    "sparse": lambda: Holds(lambda x: torch.sparse.mm(torch.eye(D).to_sparse(), x).sin()),
    "bfloat16": lambda: nn.Sequential(nn.Linear(D, D, dtype=torch.bfloat16), nn.GELU()),
    "float64": lambda: nn.Sequential(nn.Linear(D, D, dtype=torch.float64), nn.Tanh()),
    "empty": lambda: Holds(lambda x: torch.cat([x, (x[:0] * x[:0]).sin()])),
    "scalars": lambda: Holds(lambda x: x * x.mean() * x.std()),
    "an edit of a copy": lambda: Holds(with_later_edit),
    "attention": lambda: nn.TransformerEncoderLayer(D, 4, 64, batch_first=True),
}


def gradients(model: nn.Module, dtype: torch.dtype, *, num_steps: int = 3) -> list[Tensor]:
    torch.manual_seed(3)
    found = []
    for _ in range(num_steps):
        x = torch.randn(D, D, dtype=dtype, requires_grad=True)
        fill_free_memory()  # or noise that is not written yet may already be that of the same step before
        loss = model(x).float().square().sum()
        fill_free_memory()
        loss.backward()
        found += [
            x.grad if x.grad is not None else x,
            *(p.grad.clone() for p in model.parameters() if p.grad is not None),
        ]
        found += [buffer.clone() for buffer in model.buffers()]
    return found


def all_but_products(context: SelectiveCheckpointContext, op: OpOverload, *args: Any, **kwargs: Any) -> bool:
    return "mm" not in str(op)


def fill_free_memory() -> None:
    """Makes what is allocated without being written differ from one allocation to the next."""
    for value in (1.0, 2.0):
        held = [torch.full((D, D), value + number) for number in range(64)]
        del held


@pytest.mark.parametrize("rule", [True, "selective", Selective(all_but_products)], ids=["full", "selective", "policy"])
@pytest.mark.parametrize("name", QUIET)
def test_no_alarm_and_the_same_bits(name: str, rule: bool | Selective | str) -> None:
    torch.manual_seed(1)
    model = stack_of(QUIET[name], 2)
    dtype = next((p.dtype for p in model[0].parameters()), torch.float32)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    expected = gradients(model, dtype)
    model.load_state_dict(state)
    model.zero_grad()
    with graphckpt.apply(model, {"*": rule}, determinism_check="values"):  # the first step is recorded, too
        actual = gradients(model, dtype)
    assert all(torch.equal(a.nan_to_num(), e.nan_to_num()) for a, e in zip(actual, expected, strict=True))
    assert len(actual) == len(expected)


# Which calls are checked


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The blocks of the calls that are checked, in order."""
    names: list[str] = []
    begin = values.ValueCheck.__init__

    def note(self: values.ValueCheck, block: BlockContext, **kwargs: Any) -> None:
        names.append(block.name)
        begin(self, block, **kwargs)

    monkeypatch.setattr(values.ValueCheck, "__init__", note)
    _sampler_of.cache_clear()  # which has counted the calls of other tests
    return names


def test_by_default_the_first_three_calls_then_one_in_64() -> None:
    sampler = CallSampler("layers.0")
    due = [number for number in range(640) if sampler.is_due(is_learning=number == 0)]
    assert due[:3] == [0, 1, 2]
    assert [later - earlier for earlier, later in pairwise(due[3:])] == [64] * 9


def test_a_call_in_another_mode_is_a_learning_call() -> None:
    sampler = CallSampler("layers.0")
    due = [number for number in range(30) if sampler.is_due(is_learning=number in (0, 20))]
    assert due[:3] == [0, 1, 2]
    assert {20, 21, 22} <= set(due)


def test_blocks_take_turns_and_all_processes_agree() -> None:
    turns = {name: CallSampler(name)._turn for name in (f"layers.{n}" for n in range(64))}
    assert len(set(turns.values())) > 32, "no step pays for all blocks"
    assert turns["layers.0"] == 38, "not the hash of a string, which differs from process to process"


def test_a_function_is_counted_by_its_code(checked: list[str]) -> None:
    def run(number: int) -> None:
        def closure(x: Tensor) -> Tensor:
            return x.sin() * number

        graphckpt.checkpoint(closure, torch.ones(3, requires_grad=True)).sum().backward()

    for number in range(20):
        run(number)
    assert 3 <= len(checked) <= 4, "the first three, and maybe its turn"


@pytest.mark.parametrize("kind", ["nested function", "lambda", "partial", "object"])
def test_two_functions_of_a_module_are_two_blocks(kind: str, checked: list[str]) -> None:
    layer = nn.Linear(3, 3)
    factor = [1.0]

    @dataclass
    class Scaled:
        layer: nn.Linear

        def __call__(self, x: Tensor) -> Tensor:
            return (self.layer(x) * factor[0]).tanh()

    def scaled(x: Tensor) -> Tensor:
        return (layer(x) * factor[0]).tanh()

    def plain(x: Tensor) -> Tensor:
        return layer(x).tanh()

    kinds: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
        "nested function": (scaled, "scaled"),
        "lambda": (lambda x: (layer(x) * factor[0]).tanh(), "<lambda>"),
        "partial": (partial(scaled), "Linear"),
        "object": (Scaled(layer), "Linear"),
    }
    function, name = kinds[kind]
    for _ in range(5):
        graphckpt.checkpoint(plain, torch.ones(2, 3)).sum().backward()
    assert len(checked) == 3
    loss = graphckpt.checkpoint(function, torch.ones(2, 3)).sum()
    factor[0] = 2.0
    with pytest.raises(RecomputeError, match=rf"^\S*{name}: saved tensor "):
        loss.backward()


@pytest.mark.parametrize(
    "functions", [lambda: [torch.sin, torch.cos, torch.tanh], lambda: nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Tanh())]
)
def test_segments_of_a_sequence_are_counted(
    functions: Callable[[], nn.Sequential | list[Callable[[Tensor], Tensor]]], checked: list[str]
) -> None:
    chain = functions()
    for _ in range(20):
        graphckpt.checkpoint_sequential(chain, 2, torch.ones(3, requires_grad=True)).sum().backward()
    assert 3 <= len(checked) <= 4
    checked.clear()
    graphckpt.checkpoint_sequential(chain, 2, torch.ones(3, requires_grad=True), determinism_check="values")
    assert len(checked) == 1


def test_calls_of_one_sequence_at_the_same_time_have_their_own_checks(checked: list[str]) -> None:
    class Calling(nn.Module):
        """Calls the sequence that it is in, once, as another thread might at that moment."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not inner:
                inner.append(True)
                graphckpt.checkpoint_sequential(chain, 3, torch.ones(3, requires_grad=True), determinism_check="none")
            return x.sin()

    inner: list[bool] = []
    chain = nn.Sequential(Calling(), nn.Tanh(), nn.Tanh())
    graphckpt.checkpoint_sequential(chain, 3, torch.ones(3, requires_grad=True), determinism_check="values")
    assert len(checked) == 2


def test_measured_steps_are_neither_checked_nor_counted(checked: list[str]) -> None:
    model = nn.Sequential(Reader(lambda x: x))
    with graphckpt.apply(model, {"0": True}) as handle:
        with handle.measure():
            plain_step(model)
        with without_value_checks():
            plain_step(model)
        assert not checked
        plain_step(model)
        assert checked == ["0"]
        handle.explain(show=False)


def test_plans_and_verify_are_not_checked(checked: list[str]) -> None:
    model = linear_layers(4, D)
    graphckpt.plan(model, lambda: plain_step(model), memory_budget=0.9)
    assert not checked


def test_a_call_within_a_recomputation_is_not_checked(checked: list[str]) -> None:
    model = nn.Sequential(nn.Sequential(Reader(lambda x: x)))
    with graphckpt.apply(model, {"0": True, "0.0": "selective"}, determinism_check="values"):
        plain_step(model)
    assert checked == ["0", "0.0"], "each once, in the original forward"


# Nothing of a program sees the check


class CountsOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class CountsFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def profiled(run: Callable[[], None]) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return sorted(event.name for event in profile.events() if event.name.startswith("aten::"))


def in_mode(mode: CountsFunctions | CountsOps, run: Callable[[], None]) -> list[str]:
    with mode:
        run()
    return mode.names  # type: ignore[no-any-return]


WATCHES: dict[str, Callable[[Callable[[], None]], list[str]]] = {
    "a dispatch mode": lambda run: in_mode(CountsOps(), run),
    "a function mode": lambda run: in_mode(CountsFunctions(), run),
    "a profiler": profiled,
}


@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize("rule", [True, "selective"])
def test_nothing_sees_the_ops_of_the_check(watch: str, rule: bool | str) -> None:
    seen = {}
    for check in ("none", "values"):
        model = nn.Sequential(Reader(lambda x: x * 1.5))
        with graphckpt.apply(model, {"0": rule}, determinism_check=check):
            for _ in range(3):
                plain_step(model)
            seen[check] = WATCHES[watch](lambda model=model: plain_step(model))  # type: ignore[misc]
    assert seen["values"] == seen["none"]


def test_autocast_and_generators_are_left_alone() -> None:
    states = {}
    for check in ("none", "values"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(D, D), Reader(F.dropout))
        values._weights.cache_clear()
        values._all_weights.cache_clear()
        with graphckpt.apply(model, {"*": True}, determinism_check=check), torch.autocast("cpu", torch.bfloat16):
            plain_step(model)
        states[check] = [torch.get_rng_state(), *(p.grad for p in model.parameters() if p.grad is not None)]
    assert all(torch.equal(a, b) for a, b in zip(states["none"], states["values"], strict=True))


# Sketches


def difference(one: Tensor, other: Tensor) -> float:
    original = sketch_of(one)
    assert original is not None
    sketch = sketch_of(other, original.reading)
    assert sketch is not None
    pair = values._Pair(0, (one.dtype, one.shape), original.values, sketch.values)
    return float(relative_differences([pair]))


def sketches(tensor: Tensor) -> Sketch:
    sketch = sketch_of(tensor)
    assert sketch is not None
    return sketch


def test_sketches_of_a_call_share_pages_outside_of_the_heap() -> None:
    check = values.ValueCheck(BlockContext("block", []), waits=False)
    pack = values.seen_before(lambda tensor: tensor, check.see)
    tensors = [torch.randn(n, requires_grad=True) for n in (3, 5000, 100_000, 10_000, 7)]
    for tensor in tensors:
        pack(tensor)
    check.end_forward()
    sketched = [sketch.values for sketch in check.sketches if sketch is not None]
    assert [tuple(sketch.shape) for sketch in sketched] == [tuple(sketches(t).values.shape) for t in tensors]
    assert all(torch.equal(a, sketches(t).values) for a, t in zip(sketched, tensors, strict=True))
    assert {sketch.untyped_storage().nbytes() for sketch in sketched} == {2**20}
    assert len({sketch.untyped_storage().data_ptr() for sketch in sketched}) == 1
    addresses = sorted((sketch.data_ptr(), sketch.data_ptr() + sketch.nbytes) for sketch in sketched)
    assert all(end <= start for (_, end), (start, _) in pairwise(addresses)), "two sketches share memory"


RESIDENT = """
import sys, torch, graphckpt
from pathlib import Path
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        y = nn.functional.gelu(self.up(x))
        return x + self.down(y * torch.sigmoid(y))

def resident():  # the most of this process; `ru_maxrss` would be that of its parent, if it was more
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)

torch.set_num_threads(1)
model, x = nn.Sequential(*(Layer() for _ in range(24))), torch.randn(2048, 64)
graphckpt.apply(model, {"*": True}, determinism_check=sys.argv[1])
before = resident()
for _ in range(2):
    model(x).sum().backward()
print(resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say what a process took")
def test_the_check_does_not_enlarge_the_resident_set() -> None:
    """Live tensors are equal, but sketches between them in the heap would keep their memory from being joined."""
    resident = {
        check: min(
            int(subprocess.run([sys.executable, "-c", RESIDENT, check], check=True, capture_output=True).stdout)
            for _ in range(3)
        )
        for check in ("none", "values")
    }
    assert resident["none"] > 50_000, "nothing was measured"
    assert resident["values"] < 1.3 * resident["none"], resident


@pytest.mark.parametrize("shape", [(3,), (7,), (9,), (1000,), (8, 1024), (5, 1031), (300, 768), (3, 50257)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_difference_of_sketches_is_that_of_the_tensors(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    one = torch.randn(shape, dtype=dtype)
    assert difference(one, one.clone()) == 0.0
    other = one + 0.1 * torch.randn(shape, dtype=dtype)
    exact = ((one - other).double().norm() / one.double().norm()).item()
    assert exact / 4 < difference(one, other) < exact * 4, "eight numbers estimate a norm within a factor"


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.bool])
def test_one_integer_of_a_million_shows(dtype: torch.dtype) -> None:
    one = torch.randint(0, 2, (2**20,)).to(dtype) * (1 if dtype is torch.bool else 30_000)
    other = one.clone()
    other[777_777] = ~other[777_777]
    assert difference(one, one.clone()) == 0.0
    assert difference(one, other) > tolerance_of(dtype) == 0.0


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "channels last": lambda x: x.view(4, 16, 64, -1).contiguous(memory_format=torch.channels_last),
    "a slice": lambda x: x[:, : x.shape[1] // 3],
    "every second row": lambda x: x[::2],
    "heads of a fused projection": lambda x: x[:, : x.shape[1] // 3].unflatten(1, (8, -1)).transpose(0, 1),
    "expanded": lambda x: x[:1].expand(2**20, -1),
    "one number": lambda x: x[0, 0].expand(2**30),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_no_layout_takes_more_than_a_hundredth(layout: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    source = torch.randn(4096, 3072).to(dtype)
    tensor = LAYOUTS[layout](source)
    distinct = min(tensor.numel(), source.numel()) if layout not in ("expanded", "one number") else 3072
    sketches(tensor)
    with torch.no_grad(), StorageLog() as log:
        log.track([tensor])
        sketch = sketches(tensor)
    peak_bytes = log.peak_bytes - tensor.untyped_storage().nbytes()
    assert peak_bytes <= max(0.01 * distinct * dtype.itemsize, 2**21)
    assert sketch.values.numel() <= max(0.001 * distinct * (2 if dtype.is_complex else 1), 8192)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one number"])
def test_a_copy_with_other_strides_has_the_same_values(layout: str) -> None:
    tensor = LAYOUTS[layout](torch.randn(256, 768))
    if layout == "expanded":
        tensor = tensor[:64]
    original = sketches(tensor)
    copied = sketch_of(tensor.clone(memory_format=torch.contiguous_format), original.reading)
    assert copied is None or torch.allclose(copied.values, original.values, rtol=1e-4, atol=1e-5)


def test_tensors_without_plain_values_have_no_sketch() -> None:
    x = torch.randn(4, 4)
    warnings.simplefilter("ignore")
    without = [
        x.to_sparse(),
        x.to("meta"),
        torch.zeros(4, dtype=torch.uint8),
        torch.empty(0),
        torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        torch.nested.nested_tensor([x, x[:2]]),
        torch._subclasses.FakeTensorMode().from_tensor(x),
    ]
    assert [sketch_of(tensor) for tensor in without] == [None] * len(without)


def test_a_storage_that_is_freed_has_no_sketch() -> None:
    """As FSDP frees gathered parameters."""
    x = torch.randn(64)
    x.untyped_storage().resize_(0)
    assert sketch_of(x) is None


@pytest.mark.parametrize(("bad", "is_seen"), [(torch.nan, True), (torch.inf, True), (0.0, True)])
def test_nan_and_infinity_are_values(bad: float, is_seen: bool) -> None:
    one = torch.randn(64)
    other = one.clone()
    other[5] = bad
    assert (difference(one, other) > 1e-4) is is_seen
    assert (difference(other, one) > 1e-4) is is_seen
    assert difference(other, other.clone()) == 0.0


def test_explain_counts_the_sketches() -> None:
    model = nn.Sequential(Reader(lambda x: x), Reader(lambda x: x))
    with graphckpt.apply(model, {"*": True}) as handle:
        plain_step(model)
        explanation = handle.explain(show=False)
    assert 0 < explanation.sketch_bytes < 0.1 * explanation.bytes_before
    assert "of sketches in the steps that it checks" in str(explanation)
    with graphckpt.apply(model, {"*": True}, determinism_check="none") as handle:
        plain_step(model)
        explanation = handle.explain(show=False)
    assert explanation.sketch_bytes == 0
    assert "sketches" not in str(explanation)


@as_module(lambda: {"layer": nn.Sequential(nn.Linear(D, D), nn.Tanh())})
def Repeated(self: Any, x: Tensor) -> Tensor:
    for _ in range(5):
        x = self.layer(x)
    return x


SEVERAL_CALLS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "a layer that is used five times": (Repeated, {"layer": True}),
    "tiles": (lambda: nn.Sequential(Reader(lambda x: x)), {"0": Tiles(4)}),
    "segments": (lambda: stack_of(lambda: Reader(lambda x: x), 4), {"": {"segments": 3}}),
    "layers in turn": (lambda: nn.Sequential(Reader(lambda x: x), Reader(lambda x: x)), {"*": "selective"}),
}


@pytest.mark.parametrize("case", SEVERAL_CALLS)
def test_explain_counts_the_sketches_of_all_calls(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, policies = SEVERAL_CALLS[case]
    alive: list[weakref.ref[Any]] = []
    end = values.ValueCheck.end_forward

    def note(self: values.ValueCheck) -> None:
        end(self)
        alive.extend(weakref.ref(sketch.values) for sketch in self.sketches if sketch is not None)

    monkeypatch.setattr(values.ValueCheck, "end_forward", note)
    model = build()
    with graphckpt.apply(model, policies, determinism_check="values") as handle:
        for _ in range(2):  # what one step has freed is not counted in the next
            alive.clear()
            loss = model(torch.ones(D, D)).sum()
            num_bytes = sum(sketch.nbytes for ref in alive if (sketch := ref()) is not None)
            loss.backward()
            assert handle.explain(show=False).sketch_bytes == num_bytes > 0


def test_sketches_live_no_longer_than_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Any]] = []
    begin = values.ValueCheck.end_forward

    def note(self: values.ValueCheck) -> None:
        begin(self)
        alive.extend(weakref.ref(sketch.values) for sketch in self.sketches if sketch is not None)

    monkeypatch.setattr(values.ValueCheck, "end_forward", note)
    model = nn.Sequential(Reader(lambda x: x))
    gc.disable()  # no cycle may hold them
    try:
        with graphckpt.apply(model, {"*": True}):
            plain_step(model)
            assert len(alive) > 3
            assert not [ref for ref in alive if ref() is not None]
    finally:
        gc.enable()
