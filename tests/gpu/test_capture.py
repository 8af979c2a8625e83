"""Steps captured as CUDA graphs: stores, constant memory, and errors that leave the process at work."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.captured_steps import (
    MakeOptimizer,
    Train,
    adamw,
    adamw_of_ops,
    batches,
    both,
    captured,
    model_of,
    run,
    same,
)
from helpers.hard_modules import D, Mlp
from helpers.modules import as_module
from helpers.train_graphs import Predict
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from graphckpt import Graph, GraphError, Selective
from graphckpt.stores import Host
from graphckpt.stores.pinned import streams_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True"),
]

SetUp = Callable[["Train"], None]


def on_blocks(**fields: Any) -> SetUp:
    def set_up(graph: Train) -> None:
        for number in (1, 2, 3):
            graph.model[number].config.update(fields)

    return set_up


POLICIES: dict[str, SetUp] = {
    "none": lambda graph: None,
    "full": on_blocks(activation_checkpointing=True),
    "random ops kept": on_blocks(activation_checkpointing=Selective(["aten.native_dropout.default"])),
    "host": on_blocks(offload=Host(), min_elements=1),
    "host, nothing in flight": on_blocks(offload=Host(in_flight_bytes=0), min_elements=1),
    "host and full": on_blocks(activation_checkpointing=True, offload=Host(), min_elements=1),
    "host and selective": on_blocks(activation_checkpointing=Selective("matmul"), offload=Host(), min_elements=1),
    "slab": on_blocks(contiguous=True, min_elements=1),
    "slab and full": on_blocks(activation_checkpointing=True, contiguous=True, min_elements=1),
}


# --- bits


@pytest.mark.parametrize("make", [adamw, adamw_of_ops])
@pytest.mark.parametrize("policy", POLICIES)
def test_captured_is_eager(policy: str, make: MakeOptimizer) -> None:
    graph = both(make=make, set_up=POLICIES[policy])
    assert captured(graph).num_captured == 1


@pytest.mark.parametrize("policy", ["none", "full", "host and full"])
def test_bfloat16_accumulation_and_clipping(policy: str) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = adamw(model)
        optimizer.param_groups[0]["clip_grad_max_norm"] = 0.01
        return optimizer

    def set_up(graph: Train) -> None:
        POLICIES[policy](graph)
        graph.config.enable_amp(dtype=torch.bfloat16)
        graph.config.set_gradient_accumulation_steps(3)

    both(make=make, set_up=set_up)


@pytest.mark.parametrize("policy", ["none", "full", "host and selective"])
def test_verify_compares_replays_and_puts_everything_back(policy: str) -> None:
    _, graph = run("cuda_graph", set_up=POLICIES[policy])
    model = graph._roots["model"]
    before = [t.clone() for t in model.parameters()]
    state, rng_state = str(graph._update.optimizers[0].state_dict()), torch.get_rng_state()
    report = graph.verify(batches(1)[0], steps=3)
    assert report.is_captured
    assert report.num_steps == 3
    assert report.num_bytes > 3 * sum(p.nbytes for p in before)
    assert same(before, list(model.parameters()))
    assert str(graph._update.optimizers[0].state_dict()) == state
    assert torch.equal(torch.get_rng_state(), rng_state)


@as_module(lambda: {"weight": nn.Parameter(torch.ones(4096, device="cuda"))})
def Drops(self: Any, x: Tensor) -> Tensor:
    return nn.functional.dropout(x * self.weight, 0.5)


class Masks(Graph):
    """Returns the mask of forward, and that of the second run, which the gradient shows."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Drops()
        self.model.config.activation_checkpointing = True
        self.add_optimizer(torch.optim.SGD(self._roots["model"].parameters(), lr=0.0, fused=True))
        self.config.capture = "cuda_graph"

    def build(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.model(x)
        out.sum().backward()
        return out != 0, self.model.weight.grad != 0


def test_masks_differ_between_replays_and_agree_within_one_and_under_one_seed() -> None:
    graph, x, seen = Masks(), torch.ones(4096, device="cuda"), []
    for _ in range(10):
        forward, again = graph(x)
        assert torch.equal(forward, again)
        seen.append(forward)
    assert captured(graph).num_replays == 7
    assert all(not torch.equal(a, b) for n, a in enumerate(seen) for b in seen[:n])
    assert all(0.4 < mask.float().mean() < 0.6 for mask in seen)
    masks = []
    for _ in range(2):
        torch.cuda.manual_seed(11)
        masks.append(graph(x)[0])
    assert torch.equal(*masks)


# --- memory


@pytest.mark.parametrize("policy", ["none", "full", "host and full", "slab"])
@pytest.mark.serial
def test_memory_is_constant_over_100_replays(policy: str) -> None:
    graph = Train(model := model_of(), adamw(model))
    POLICIES[policy](graph)
    x = batches(1)[0]
    for number in range(110):
        graph(x)
        if number == 9:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.synchronize()
    assert captured(graph).num_replays == 107
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


def in_use() -> tuple[int, int]:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


@pytest.mark.serial
def test_a_deleted_graph_gives_its_memory_back() -> None:
    def steps() -> None:
        graph = Train(model := model_of(), adamw(model))
        for x in batches(6, rows=4096):
            graph(x)
        assert captured(graph).backend.pool_bytes() > 0

    steps()  # fills cuBLAS's workspaces
    before = in_use()
    steps()
    assert in_use() == before


def test_a_released_graph_records_again() -> None:
    """The pool of recordings that are all gone is no longer there to record into."""
    graph = Train(model := model_of(), adamw(model))
    inputs = batches(10)
    for x in inputs[:6]:
        graph(x)
    captured(graph).release()
    for x in inputs[6:]:
        graph(x)
    assert captured(graph).num_captured == 2


def test_a_slab_that_is_recorded_outlives_a_bigger_one() -> None:
    junk: list[Tensor] = []

    def between(number: int, graph: Graph) -> None:
        junk.append(torch.full((16 * D * D,), float("nan"), device="cuda"))  # takes memory that was let go

    small, big = batches(10), batches(8, rows=48)
    graph = both(None, set_up=POLICIES["slab"], inputs=[*small[:5], *big, *small[5:]], between=between)
    assert captured(graph).num_captured == 2
    assert all(bool(t.isnan().all()) for t in junk), "a replay has written to memory that is not its own"


# --- several at once


def test_graphs_side_by_side() -> None:
    def results(capture: str) -> list[Tensor]:
        one, other = model_of(), model_of()
        graphs = [Train(one, adamw(one), capture=capture), Train(other, adamw_of_ops(other), capture=capture)]
        graphs.append(Predict(one))  # type: ignore[arg-type]
        graphs[2].config.capture = capture
        on_blocks(activation_checkpointing=True)(graphs[0])
        torch.manual_seed(7)
        seen = [graph(x) for number, x in enumerate(batches(10)) for graph in (graphs if number % 3 else graphs[::-1])]
        if capture != "eager":
            assert all(captured(graph).num_replays == 7 for graph in graphs)
        return seen

    assert same(results("cuda_graph"), results("eager"))


def test_releasing_one_graph_leaves_the_others_alone() -> None:
    """They share a stream, and would share cuBLAS's workspace: its address is in every graph."""
    going = Train(model := model_of(), adamw(model))
    for x in batches(6):
        going(x)
    junk: list[Tensor] = []

    def between(number: int, graph: Graph) -> None:
        if number == 6 and captured(graph) is not None:
            assert captured(graph).num_replays == 3
            captured(going).release()
            torch.cuda.empty_cache()
        if number >= 6:
            junk.append(torch.full((2**20,), float("nan"), device="cuda"))  # takes memory that was let go

    graph = both(between=between)
    assert captured(graph).num_captured == 1
    assert junk
    assert all(bool(t.isnan().all()) for t in junk), "a replay has written to memory that is not its own"


# --- what cannot be captured


class Hazard(Mlp):
    """Adds a number that depends on ``term``."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.term(x)


TERMS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item() > 1e30,
    "item in a block that runs again": lambda x: x.sum().item() > 1e30,
    "data-dependent shape": lambda x: float(x[x > 1e30].shape[0]),
    "tensor of the host": lambda x: torch.ones(D).to(x.device),
    "synchronize": lambda x: torch.cuda.synchronize() or 0.0,
    "draws on the host": lambda x: bool(torch.rand(()) > 2),
    "pinned memory": lambda x: 0.0 * torch.empty(D, pin_memory=True).copy_(x[0], non_blocking=True).numel(),
}


def hazardous(hazard: str) -> nn.Module:
    model = model_of()
    torch.manual_seed(0)
    model[2] = (Hazard if hazard in TERMS else Mlp)().cuda()
    model[2].term = TERMS.get(hazard)
    return model


AT = r"model\.2.* · test_capture\.py:\d+ in <lambda>: .* · fix: "
HAZARDS: dict[str, tuple[SetUp, str]] = dict.fromkeys(TERMS, (POLICIES["none"], AT)) | {
    "item in a block that runs again": (POLICIES["full"], AT),
    "draws on the host": (POLICIES["none"], r"draws random numbers with torch on the CPU.* · fix: "),
    "disk": (on_blocks(offload="disk", min_elements=1), r"cannot be offloaded to disk in a CUDA graph.* · fix: "),
}
del HAZARDS["pinned memory"]  # which PyTorch may allow


def the_process_works() -> None:
    """No capture is under way, neither for the stream nor for the allocator nor for the generator; a new one works."""
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.manual_seed(3)
    first = torch.rand(8, device="cuda")
    torch.cuda.manual_seed(3)
    assert torch.equal(torch.rand(8, device="cuda"), first)
    torch.cuda.empty_cache()
    both(set_up=POLICIES["host and full"])


@pytest.mark.parametrize("hazard", HAZARDS)
@pytest.mark.filterwarnings("ignore:offload to 'disk' saves")
def test_the_error_of_a_step_that_cannot_be_captured_says_where(hazard: str) -> None:
    set_up, message = HAZARDS[hazard]
    other = Train(model := model_of(), adamw(model))  # recorded before, replayed after
    reference = Train(model := model_of(), adamw(model), capture="eager")
    inputs = batches(12)
    for graph in (other, reference):
        torch.cuda.manual_seed(2)
        for x in inputs[:6]:
            graph(x)
    with pytest.raises(GraphError, match=message):
        run("cuda_graph", build_model=lambda: hazardous(hazard), set_up=set_up)
    the_process_works()
    losses = []
    for graph in (other, reference):
        torch.cuda.manual_seed(2)
        losses.append([graph(x) for x in inputs[6:]])
    assert same(*losses)
    assert captured(other).num_captured == 1


@pytest.mark.parametrize("hazard", HAZARDS)
@pytest.mark.filterwarnings("ignore:offload to 'disk' saves")
def test_auto_goes_on_without_capture(hazard: str) -> None:
    settings: dict[str, Any] = {"build_model": lambda: hazardous(hazard), "set_up": HAZARDS[hazard][0]}
    plain, _ = run("eager", **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours, graph = run("auto", **settings)
    assert same(ours, plain)
    assert sum("cannot be captured" in str(w.message) for w in caught) == 1
    assert captured(graph).reason is not None
    the_process_works()


@pytest.mark.serial
def test_a_failed_capture_gives_its_memory_back() -> None:
    def steps() -> None:
        graph = Train(model := hazardous("item"), adamw(model))
        *inputs, last = batches(4, rows=4096)
        for x in inputs:
            graph(x)
        with pytest.raises(GraphError, match="cannot be captured"):
            graph(last)

    steps()  # fills cuBLAS's workspaces
    _, before = in_use()
    for _ in range(3):
        steps()
    assert in_use()[1] == before


def test_pinned_memory_made_in_a_step() -> None:
    """PyTorch allows it in a capture, in memory of the graph's own, or says that it does not."""
    plain, _ = run("eager", build_model=lambda: hazardous("pinned memory"))
    try:
        ours, _ = run("cuda_graph", build_model=lambda: hazardous("pinned memory"))
    except GraphError as error:
        assert "model.2" in str(error)  # noqa: PT017 - either is right
        assert "fix:" in str(error)  # noqa: PT017
    else:
        assert same(ours, plain)
    the_process_works()


# --- data parallel


@pytest.mark.skipif(not dist.is_available() or not dist.is_nccl_available(), reason="no NCCL")
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("where", ["on the stream of the recording", "on the default stream"])
def test_data_parallel(where: str, policy: str, tmp_path: Path) -> None:
    """Eleven steps come before the recording, and the recording goes before the process group.

    The wrapper holds on to nodes of autograd that remember the stream that it was made on. A capture cannot wait for
    that one; newer PyTorch can be told to leave it out (pytorch#180090).
    """
    stream = torch.cuda.default_stream()
    if where == "on the stream of the recording":
        stream = streams_of(torch.device("cuda", 0)).capture
    elif not hasattr(torch.autograd.graph, "set_override_stale_capture_stream"):
        pytest.skip("this torch waits for the default stream")
    dist.init_process_group(
        "nccl", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    try:

        def steps(capture: str) -> list[Any]:
            inner = model_of()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                model = DistributedDataParallel(inner, device_ids=[0])
            torch.cuda.current_stream().wait_stream(stream)
            graph = Train(model, adamw(inner), capture=capture)
            if policy == "full":
                for block in graph.model.module:
                    block.config.activation_checkpointing = True
            torch.manual_seed(5)
            losses = [graph(x) for x in batches(16)]
            if capture != "eager":
                assert captured(graph).num_captured == 1
                assert captured(graph).num_replays == 5
            return [*losses, *(p.detach().clone() for p in inner.parameters())]

        plain = steps("eager")
        ours = steps("cuda_graph")
        assert same(ours, plain)
    finally:
        gc.collect()  # the recording
        torch.cuda.synchronize()
        dist.destroy_process_group()
