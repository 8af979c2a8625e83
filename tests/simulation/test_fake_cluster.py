"""A simulated rank of an absent cluster: what a step may call, what is refused, and that nothing of it is left."""

from __future__ import annotations

import os
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import init_process_group, new_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import graphckpt
from graphckpt import ConfigError, Plan, PlanError
from graphckpt._compat_memory import gradient_buckets
from graphckpt.planning.steps import made_step
from graphckpt.simulation.allocations import replay
from graphckpt.simulation.cluster_profile import load_cluster
from graphckpt.simulation.fake_cluster import FakeCluster
from graphckpt.simulation.fake_device import FakeDevice
from graphckpt.simulation.profile import load_profile

D, NUM_TOKENS, NUM_WORDS = 256, 64, 96
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def as_dtensor(parameter: torch.Tensor) -> DTensor:
    assert isinstance(parameter, DTensor)
    return parameter


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(D), nn.Linear(D, 4 * D, bias=False), nn.Linear(4 * D, D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(NUM_WORDS, D), nn.Linear(D, NUM_WORDS, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


def step_of(model: nn.Module, tokens: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def sharded() -> tuple[nn.Module, Callable[[], None]]:
    model = Model(2)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh)
    return model, step_of(model, torch.zeros(2, NUM_TOKENS, dtype=torch.long))


def planned(
    make: Callable[[], Any],
    world_size: int,
    rank: int | None = None,
    budget: str | int = "1GiB",
    candidates: Sequence[object] | None = ("full",),
    **more: Any,
) -> Plan:
    """One policy, except where a test is about which there are."""
    options = {"world_size": world_size, "rank": rank, "memory_budget": budget, "candidates": candidates, **more}
    return graphckpt.plan(make, device="cpu", **options)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    hook, init, make, cuda = sys.excepthook, dist.init_process_group, init_device_mesh, torch.cuda.set_device
    before = {name: os.environ.get(name) for name in VARIABLES}
    yield
    assert not dist.is_initialized()
    assert {name: os.environ.get(name) for name in VARIABLES} == before
    assert sys.excepthook is hook
    assert (dist.init_process_group, init_device_mesh, torch.cuda.set_device) == (init, make, cuda)
    assert dist.distributed_c10d.new_group is new_group


def test_inside_is_a_group_of_that_size() -> None:
    with FakeCluster(64, rank=9):
        assert (dist.get_world_size(), dist.get_rank(), dist.get_backend()) == (64, 9, "fake")
        assert [os.environ[name] for name in VARIABLES] == ["9", "64", "1", "8"]
        assert torch.cuda.current_device() == 1
        init_process_group("nccl", device_id=torch.device("cuda:1"))
        dist.init_process_group(backend="gloo", timeout=None)
        assert dist.get_world_size() == 64
        assert dist.get_process_group_ranks(new_group([8, 9], backend="nccl")) == [8, 9]
        dist.destroy_process_group()
        assert dist.is_initialized(), "the planner ends it"


def test_meshes_have_values_among_fake_tensors() -> None:
    with FakeCluster(64, rank=9), FakeDevice(load_profile("h200")):
        mesh = init_device_mesh("cuda", (4, 8, 2), mesh_dim_names=("pp", "dp", "tp"))
        assert [mesh.get_local_rank(name) for name in ("pp", "dp", "tp")] == [0, 4, 1]
        assert dist.get_process_group_ranks(mesh["tp"].get_group()) == [8, 9]
        assert dist.get_process_group_ranks(mesh["dp", "tp"]._flatten("all").get_group()) == list(range(16))
        assert mesh["dp"].size() == 8
        assert dist.device_mesh.DeviceMesh("cuda", [[1, 9], [3, 4]], mesh_dim_names=("a", "b"))["b"].get_rank() == 9


def test_a_rank_in_the_environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with FakeCluster(2, 1):
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("1", "2")
    assert os.environ["RANK"] == "5"
    assert "WORLD_SIZE" not in os.environ


def test_clusters_of_several_sizes_and_ranks_in_one_process() -> None:
    """The shapes of uneven shards are those of the rank, whatever was simulated before."""
    for world_size, rank, rows in ((2, 0, 4), (2, 1, 3), (3, 2, 1), (2, 0, 4)):
        with FakeCluster(world_size, rank), FakeDevice(load_profile("cpu")):
            mesh = init_device_mesh("cuda", (world_size,))
            shard = distribute_tensor(torch.ones(7, 8), mesh, [Shard(0)])
            assert (shard + shard).to_local().shape == shard.to_local().shape == (rows, 8)
            assert shard.sum(dim=1).to_local().shape == (rows,)


def test_a_plan_of_a_rank(tmp_path: Path) -> None:
    one, eight = planned(sharded, 1), planned(sharded, 8)
    assert eight.plain_peak_bytes < one.plain_peak_bytes
    assert (eight.world_size, eight.rank, one.world_size) == (8, 0, 1)
    assert "on cpu (simulated, rank 0 of 8)" in str(eight).replace("\n", " ")
    assert "rank 0 of" not in str(one)
    assert any("communication as on the pcie profile" in note for note in eight.notes)
    assert not any("communication" in note for note in one.notes)
    eight.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml").world_size == 8
    last = planned(sharded, 8, rank=7)
    assert last.rank == 7
    assert last.plain_peak_bytes <= eight.plain_peak_bytes


def test_collectives_of_fsdp_allocate_on_streams_of_their_own() -> None:
    """Blocks that are free on one stream are of no use to another: the allocator reserves more."""

    def make() -> tuple[nn.Module, Callable[[], None]]:
        model, mesh = Model(), init_device_mesh("cuda", (8,))
        for part in (*model.layers, model):
            fully_shard(part, mesh=mesh)
        return model, step_of(model, torch.zeros(2, NUM_TOKENS, dtype=torch.long))

    with FakeCluster(8) as cluster:
        step, model = made_step(make, FakeDevice(load_profile("h100"), cluster=cluster), "step")
        log = step.run().allocations
    assert log is not None
    births = {entry: log.streams.get(entry, 0) for entry in log.steps[-1] if entry >= 0}
    gathered = sum(8 * shard.to_local().nbytes for shard in map(as_dtensor, model.layers[0].parameters()))
    streams = {stream for entry, stream in births.items() if log.sizes[entry] == gathered}
    assert len(streams - {0}) == 1, "that of the all-gathers; gradients to be reduced have that size too"
    assert len({*births.values()}) == 3, "and that of the reduce-scatters"
    on_one = replace(log, streams={})
    apart, together = (replay(each) for each in (log, on_one))
    assert apart.allocated_bytes == together.allocated_bytes
    assert apart.reserved_bytes > together.reserved_bytes


def test_the_memory_of_nccl_is_beside_the_allocator() -> None:
    """One group of FSDP2 on a profile that states 256 MiB for each: ``"max"`` leaves as much."""

    def make() -> tuple[nn.Module, Callable[[], None]]:
        model, mesh = Model(), init_device_mesh("cuda", (dist.get_world_size(),))
        if dist.get_world_size() > 1:
            fully_shard(model, mesh=mesh)
        return model, step_of(model, torch.zeros(2, NUM_TOKENS, dtype=torch.long))

    def headroom(world_size: int) -> int:
        plan = graphckpt.plan(make, device="h100", world_size=world_size, memory_budget="max", progress=False)
        assert plan.predicted_nvidia_smi_bytes == plan.predicted_reserved_bytes + plan.headroom_bytes
        return plan.headroom_bytes

    assert headroom(8) - headroom(1) == load_cluster("dgx-h100").comm_bytes == 256 * 2**20


def test_a_size_that_the_parameters_of_the_rank_exceed_is_refused_at_once() -> None:
    num_bytes = 4 * sum(parameter.numel() for parameter in Model(2).parameters())
    runs: list[int] = []
    with pytest.raises(PlanError, match="the parameters alone take"):
        planned(sharded, 2, budget=num_bytes // 3, progress=lambda done, total: runs.append(done))
    assert not runs
    with pytest.raises(PlanError, match="the lowest possible peak is"):
        planned(sharded, 4, budget=num_bytes // 3)


def test_fit_of_a_rank() -> None:
    def make_step(batch_size: int) -> tuple[nn.Module, Callable[[], None]]:
        model, _ = sharded()
        return model, step_of(model, torch.zeros(batch_size, NUM_TOKENS, dtype=torch.long))

    def fitted(world_size: int) -> graphckpt.Fit:
        sizes = [4, 16]
        return graphckpt.fit(
            make_step,
            batch_sizes=sizes,
            memory_budget="1GiB",
            device="cpu",
            world_size=world_size,
            rank=0,
            candidates=["full"],
        )

    one, eight = fitted(1), fitted(8)
    assert (eight.world_size, eight.rank) == (8, 0)
    assert eight.rows[0].peak_bytes < one.rows[0].peak_bytes
    assert "rank 0 of 8" in str(eight).replace("\n", " ")
    assert any("communication as on the pcie profile" in note for note in eight.notes)


def pretraining_script() -> tuple[nn.Module, Callable[[], None]]:
    """Builds a step as large training scripts do, for the machine on which it will run."""
    local_rank, world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(f"cuda:{local_rank}")
    torch.cuda.set_device(device)
    init_process_group("nccl", device_id=device)
    dist.barrier()
    mesh = init_device_mesh("cuda", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    gloo = new_group(backend="gloo")
    with torch.device("meta"):
        model = Model(2)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.layers:
        parallelize_module(
            layer,
            mesh["tp"],
            {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
        fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], ends)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    model.to_empty(device="cuda")
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(0, NUM_WORDS, (2, NUM_TOKENS)).cuda()

    def step() -> None:
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        total = loss.detach().clone()
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        dist.all_reduce(total, group=gloo)
        float(total), norm.full_tensor().item()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # real ranks warn too
def test_a_script_for_real_ranks_is_planned_unchanged() -> None:
    where = {"device": "h200", "world_size": 64, "rank": 9}
    plan = graphckpt.plan(pretraining_script, **where, memory_budget="max", candidates=["full"])  # type: ignore[arg-type]
    assert plan.keeps_everything
    assert plan.predicted_reserved_bytes > plan.predicted_peak_bytes
    assert "AdamW fused" in plan.assumptions


def wrapped_step(model: nn.Module, **how: Any) -> tuple[DistributedDataParallel, Callable[[], None]]:
    wrapper = DistributedDataParallel(model, device_ids=[int(os.environ["LOCAL_RANK"])], **how)
    return wrapper, step_of(wrapper, torch.zeros(32, NUM_TOKENS, dtype=torch.long))


def test_ddp_is_the_class_of_pytorch_with_buckets() -> None:
    num_bytes = 4 * sum(parameter.numel() for parameter in Model().parameters())
    with FakeCluster(8, rank=3), FakeDevice(load_profile("h200")):
        model = Model()
        wrapper, step = wrapped_step(model, process_group=new_group(backend="nccl"))
        assert isinstance(wrapper, DistributedDataParallel)
        assert wrapper.module is model
        assert {name.partition(".")[0] for name in wrapper.state_dict()} == {"module"}
        for num_buckets in (1, 1, 2):  # the second forward knows the order, and makes buckets of 1 and 25 MiB
            assert len(gradient_buckets(model.parameters())) == num_buckets
            assert sum(bucket.nbytes for bucket in gradient_buckets(model.parameters())) == num_bytes
            step()
        del wrapper, step
        assert not gradient_buckets(model.parameters())


def test_gradients_are_views_of_the_buckets_if_ddp_is_asked_for_it() -> None:
    tokens = torch.zeros(2, NUM_TOKENS, dtype=torch.long)
    for as_views in (False, True):
        with FakeCluster(2), FakeDevice(load_profile("cpu")):
            model = Model()
            wrapper = DistributedDataParallel(model, gradient_as_bucket_view=as_views)
            for _ in range(3):
                wrapper(tokens).sum().backward()
                storages = {bucket.untyped_storage() for bucket in gradient_buckets(model.parameters())}
                gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
                assert len(gradients) == len(list(model.parameters()))
                assert {gradient.untyped_storage() in storages for gradient in gradients} == {as_views}
                model.zero_grad()


def test_a_bucket_is_reduced_when_its_last_gradient_is_ready() -> None:
    calls: list[str] = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(str(func.overloadpacket))
            return func(*args, **(kwargs or {}))

    def reductions_of(wrapper: nn.Module, *, is_synchronized: bool = True) -> tuple[int, int]:
        """Returns their number, and how many products of backward follow the first one."""
        calls.clear()
        loss = wrapper(torch.zeros(2, NUM_TOKENS, dtype=torch.long)).sum()
        with Calls():
            loss.backward()
        places = [place for place, call in enumerate(calls) if call == "c10d.allreduce_"]
        return len(places), calls[places[0] :].count("aten.mm") if is_synchronized else 0

    with FakeCluster(2), FakeDevice(load_profile("cpu")):
        wrapper = DistributedDataParallel(Model(), bucket_cap_mb=2)
        num_reductions, num_products = reductions_of(wrapper)
        assert (num_reductions, num_products) == (1, 0), "one bucket until the order is known"
        num_reductions, num_products = reductions_of(wrapper)
        assert num_reductions > 2
        assert num_products > 2, "they overlap with backward"
        with wrapper.no_sync():
            assert reductions_of(wrapper, is_synchronized=False) == (0, 0)
        assert reductions_of(wrapper) == (num_reductions, num_products)


def test_parameters_without_a_gradient_under_ddp() -> None:
    def make(**how: Any) -> tuple[nn.Module, Callable[[], None]]:
        model: Any = Model()
        model.layers[1].unused = nn.Linear(D, D)
        _, step = wrapped_step(model, **how)
        return model, step

    with pytest.raises(ConfigError) as error:
        planned(make, 2)
    place, _, what = str(error.value).partition(": ")
    assert re.fullmatch(r"DistributedDataParallel \(test_fake_cluster.py, line \d+\)", place)
    names = "layers.1.unused.weight, layers.1.unused.bias"
    assert what.startswith(f"expected a gradient for each parameter, got none for {names} · fix: find_unused_param")
    for how in ({"find_unused_parameters": True}, {"static_graph": True}):
        assert planned(lambda how=how: make(**how), 2).world_size == 2


def test_layers_that_are_alike_are_measured_in_a_short_run_under_ddp() -> None:
    """It has no gradients for the layers that are left out."""
    lengths: set[int] = set()

    def make() -> tuple[nn.Module, Callable[[], None]]:
        model = Model(8)
        model.register_forward_hook(lambda model, *_: lengths.add(len(model.layers)))
        return wrapped_step(model)

    two = ["full", {"rule": "selective", "save": "matmul"}]  # keep and full run with all layers
    lowest = planned(make, 2, budget="min", candidates=two)
    assert min(lengths) < 8, "some runs are short"
    assert set(lowest.policies) >= {f"module.layers.{number}" for number in range(6)}
    assert lowest.predicted_peak_bytes < lowest.plain_peak_bytes


def stage_of(module: nn.Module) -> PipelineStage:
    hidden = torch.empty(2, D, device="meta", requires_grad=True)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return PipelineStage(module, dist.get_rank(), dist.get_world_size(), device, hidden, hidden)


def pipeline() -> tuple[nn.Module, Callable[[], None]]:
    module = nn.Sequential(Block(), Block())
    schedule = Schedule1F1B(stage_of(module), 4, loss_fn=lambda output, target: (output - target).square().mean())
    inputs = [torch.zeros(8, D)] if dist.get_rank() == 0 else []
    target = {"target": torch.zeros(8, D)} if dist.get_rank() == dist.get_world_size() - 1 else {}
    return module, lambda: schedule.step(*inputs, **target)


def test_a_stage_of_a_pipeline_is_planned_alone() -> None:
    first, second, last = (planned(pipeline, 3, rank=rank) for rank in range(3))
    assert (first.rank, second.rank, last.rank) == (0, 1, 2)
    assert first.plain_peak_bytes > last.plain_peak_bytes, (
        "it has three micro-batches at a time, and the last stage one"
    )


def test_a_work_holds_its_tensor_as_those_of_nccl_and_gloo_do() -> None:
    with FakeCluster(2), FakeDevice(load_profile("cpu")):
        for post in (dist.isend, dist.irecv):
            tensor = torch.zeros(8)
            storage = weakref.ref(tensor.untyped_storage())
            works = [post(tensor, 1), *dist.batch_isend_irecv([dist.P2POp(post, tensor, 1)])]
            del tensor
            assert [work.wait() for work in works] == [True, True]
            assert storage() is not None
            del works
            assert storage() is None
        dist.send(torch.zeros(2), 1)
        dist.recv(torch.zeros(2), 1)


def wrapped_by(
    wrap: Callable[[nn.Module], Any],
) -> Callable[[], tuple[Any, Callable[[], None]]]:
    def make() -> tuple[Any, Callable[[], None]]:
        return wrap(Model()), lambda: None

    return make


def read_a_count() -> tuple[nn.Module, Callable[[], None]]:
    model, step = sharded()

    def count() -> None:
        step()
        num_tokens = torch.ones((), dtype=torch.long)
        dist.all_reduce(num_tokens)
        int(num_tokens.item())  # the line that the error names

    return model, count


@pytest.mark.parametrize(
    ("make", "call"),
    [
        (
            wrapped_by(lambda model: DistributedDataParallel(model).register_comm_hook(None, lambda *_: None)),
            "DistributedDataParallel.register_comm_hook",
        ),
        (wrapped_by(lambda model: DistributedDataParallel(model).join()), "DistributedDataParallel.join"),
        (
            wrapped_by(lambda model: DistributedDataParallel(model, mixed_precision=object())),  # type: ignore[arg-type]
            "DistributedDataParallel(mixed_precision=...)",
        ),
        (
            wrapped_by(lambda model: DistributedDataParallel(nn.ModuleList([model, nn.Embedding(2, 2, sparse=True)]))),
            "DistributedDataParallel with sparse gradients",
        ),
        (wrapped_by(FullyShardedDataParallel), "FullyShardedDataParallel"),
        (
            wrapped_by(lambda model: fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))),
            "CPUOffloadPolicy",
        ),
        (wrapped_by(lambda model: PipelineStage(model, 0, 2, torch.device("cpu"))), "input_args and output_args"),
        (
            wrapped_by(lambda model: ScheduleInterleaved1F1B([stage_of(model), stage_of(model)], 4)),
            "ScheduleInterleaved1F1B",
        ),
        (
            wrapped_by(lambda model: ScheduleZBVZeroBubble([stage_of(model), stage_of(model)], 4)),
            "ScheduleZBVZeroBubble",
        ),
        (wrapped_by(lambda model: context_parallel(model)), "context_parallel"),  # type: ignore[arg-type]  # noqa: PLW0108
        (wrapped_by(lambda model: dist.all_gather_object([None] * 2, model)), "torch.distributed.all_gather_object"),
        (wrapped_by(lambda model: dist.broadcast_object_list([1])), "torch.distributed.broadcast_object_list"),
        (read_a_count, "reads the value of a tensor by torch.Tensor.item"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_error_of_a_call_that_cannot_be_simulated_names_its_line(make: Callable[[], Any], call: str) -> None:
    with pytest.raises(ConfigError, match=r"\(test_fake_cluster\.py, line \d+\).* · fix: ") as error:
        planned(make, 2)
    assert call in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 0}, "world_size: expected an int of 1 or more, got 0"),
        ({"world_size": True}, "world_size: expected an int of 1 or more, got True"),
        ({"world_size": "8"}, "world_size: expected an int of 1 or more, got '8'"),
        ({"world_size": 8, "rank": 8}, "rank: expected less than world_size 8, got 8"),
        ({"world_size": 8, "rank": -1}, "rank: expected an int of 0 or more, got -1"),
        ({"rank": 1}, "rank: expected world_size with it, got 1 alone"),
        ({"world_size": 8, "device": None}, "world_size: expected device with it, got world_size=8 alone"),
    ],
)
def test_arguments_that_cannot_be_used(arguments: dict[str, Any], message: str) -> None:
    for function in (graphckpt.plan, graphckpt.fit):
        with pytest.raises(ConfigError) as error:
            function(sharded, **{"device": "cpu", "memory_budget": "1GiB", **arguments})  # type: ignore[operator]
        assert str(error.value).startswith(message)
        assert " · fix: " in str(error.value)


def test_a_process_with_a_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # PyTorch replaces it, and leaves it so
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="expected no process group in this process, got one of 1 · fix: plan"):
            planned(sharded, 2)
        assert dist.get_backend() == "gloo"
    finally:
        dist.destroy_process_group()


def test_a_function_that_was_imported_meanwhile_is_the_original_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with FakeCluster(2):
        imported = dist.init_process_group
    imported("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.get_backend() == "gloo"
    dist.destroy_process_group()


def test_to_wait_for_a_collective_is_not_a_kernel() -> None:
    device, x = load_profile("h200"), torch.empty(2**20, device="meta")
    wait = torch.ops._c10d_functional.wait_tensor.default
    assert device.op_seconds(wait, (x,), {}, torch.empty_like(x)) == 0.0
    assert device.op_seconds(torch.ops.aten.relu.default, (x,), {}, torch.empty_like(x)) > 0.0


def test_an_error_of_the_step_leaves_nothing() -> None:
    def make() -> NoReturn:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        planned(make, 4)
    assert planned(sharded, 2).world_size == 2


def test_units_of_fsdp_are_not_joined() -> None:
    plan = planned(sharded, 2, candidates=None)
    assert "joined" not in {row.option for row in plan.rows}
    with pytest.raises(ConfigError, match=r"candidates: joined recomputes several blocks .* leave 'joined' out of"):
        graphckpt.plan(sharded, device="h200", world_size=2, memory_budget="min", candidates=["full", "joined"])


def test_a_plan_of_one_process_within_a_simulated_rank_is_refused() -> None:
    def make() -> tuple[nn.Module, Callable[[], None]]:
        def step() -> None:
            graphckpt.plan(lambda: (nn.Sequential(nn.Linear(2, 2)), int), device="h100", memory_budget="max")

        return sharded()[0], step

    with pytest.raises(ConfigError, match=r"world_size: expected no simulated rank around a plan, got one"):
        planned(make, 2)
    assert planned(sharded, 2).world_size == 2


def test_waiting_for_a_collective_allocates_nothing() -> None:
    with FakeCluster(2), FakeDevice(load_profile("cpu")):
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(torch.ones(4), 2, dist.group.WORLD.group_name)  # type: ignore[union-attr]
        waited = torch.ops._c10d_functional.wait_tensor(gathered)
        assert waited.untyped_storage() is gathered.untyped_storage()


def test_optimizers_of_sharded_weights_run_in_a_loop() -> None:
    """As on a device, where PyTorch takes the foreach implementation for plain tensors alone."""
    plan = graphckpt.plan(sharded, device="h200", world_size=2, memory_budget="1GiB", candidates=["full"])
    assert "AdamW in a loop" in plan.assumptions


def unsupported_by_name() -> dict[str, Callable[[], object]]:
    """Returns calls of what is not simulated, each through a name that was bound before the step is simulated."""
    from functools import partial  # noqa: PLC0415

    from torch.distributed import all_gather_object as gather  # noqa: PLC0415
    from torch.distributed.fsdp import CPUOffloadPolicy as Policy  # noqa: PLC0415
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard as shard  # noqa: PLC0415
    from torch.distributed.tensor.experimental import context_parallel as parallel  # noqa: PLC0415

    class Holder:
        of_class = staticmethod(parallel)

    def default(model: nn.Module, function: Callable[..., object] = shard) -> object:
        return function(model, offload_policy=Policy())

    sharded = partial(shard, offload_policy=Policy())
    return {
        "context_parallel": lambda: parallel(init_device_mesh("cuda", (4,)), buffers=[]),
        "context_parallel of a class": lambda: Holder.of_class(init_device_mesh("cuda", (4,)), buffers=[]),
        "offload_policy": lambda: shard(nn.Linear(8, 8), offload_policy=Policy()),
        "offload_policy of a partial": lambda: sharded(nn.Linear(8, 8)),
        "offload_policy by default": lambda: default(nn.Linear(8, 8)),
        "FullyShardedDataParallel": lambda: Fsdp(nn.Linear(8, 8)),
        "all_gather_object": lambda: gather([None] * 4, 1),
    }


@pytest.mark.parametrize("name", unsupported_by_name())
def test_what_is_not_simulated_is_refused_by_whatever_name_it_is_called(name: str) -> None:
    call = unsupported_by_name()[name]
    with FakeCluster(4):
        init_process_group("nccl")
        with pytest.raises(ConfigError, match=rf"{name.partition(' ')[0]}.*test_fake_cluster.py, line \d+"):
            call()


def test_functions_are_as_before_after_a_simulated_rank() -> None:
    functions: list[Any] = [context_parallel, fully_shard, new_group, init_process_group, init_device_mesh]
    before = [(each.__code__, each.__kwdefaults__) for each in functions]
    with FakeCluster(4):
        new_group([0, 1])
    assert [(each.__code__, each.__kwdefaults__) for each in functions] == before
