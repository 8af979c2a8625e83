"""The seconds of collectives, what of them computation waits for, and the profiles that they follow from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.layer_stacks import stack_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import graphckpt
from graphckpt import ConfigError, Plan
from graphckpt.simulation.allocations import AllocationTrace
from graphckpt.simulation.cluster_profile import ClusterProfile, Link, default_cluster, load_cluster
from graphckpt.simulation.fake_cluster import FakeCluster
from graphckpt.simulation.fake_device import FakeDevice
from graphckpt.simulation.profile import load_profile, profile_names
from graphckpt.simulation.profile_files import packaged_names
from graphckpt.simulation.timeline import Timeline, bubble_seconds

D, NUM_LAYERS = 1024, 4
GB = 10**9


def cluster(within: float = 100e9, between: float = 10e9, latency: float = 0.0) -> ClusterProfile:
    links = Link(within, latency), Link(between, 10 * latency)
    return ClusterProfile(name="test", ranks_per_node=4, within_node=links[0], between_nodes=links[1])


class TestSeconds:
    def test_a_ring_within_a_node(self) -> None:
        """Each of 4 ranks receives 3 GB of the 4 at 100 GB/s, in 3 hops."""
        seconds = cluster(latency=1e-3).seconds
        assert seconds("gather", 4 * GB, range(4)) == pytest.approx(0.03 + 0.003)
        assert seconds("scatter", 4 * GB, range(4)) == pytest.approx(0.03 + 0.003)
        assert seconds("all_reduce", 4 * GB, range(4)) == pytest.approx(2 * (0.03 + 0.003))
        assert seconds("all_to_all", 4 * GB, range(4)) == pytest.approx(0.03 + 0.003)
        assert seconds("broadcast", 4 * GB, range(4)) == pytest.approx(0.04 + 0.003)
        assert seconds("send", 4 * GB, (1, 2)) == pytest.approx(0.04 + 0.001)
        assert seconds("barrier", 1, range(4)) == pytest.approx(0.006)

    def test_a_ring_between_nodes(self) -> None:
        """Of ranks 0, 4, 8 and 12, each on a node of its own, at 10 GB/s, in 3 hops of 10 ms."""
        seconds = cluster(latency=1e-3).seconds
        assert seconds("gather", 4 * GB, (0, 4, 8, 12)) == pytest.approx(0.3 + 0.03)
        assert seconds("send", GB, (3, 4)) == pytest.approx(0.1 + 0.01)

    def test_rings_use_the_adapters_of_all_ranks_of_a_node(self) -> None:
        """Two on each of two nodes: 20 GB/s, with 2 hops within nodes and one between them."""
        seconds = cluster(latency=1e-3).seconds
        assert seconds("gather", 4 * GB, (0, 1, 4, 5)) == pytest.approx(3 / 20 + 0.012)
        assert seconds("gather", 5 * GB, (0, 1, 2, 4, 5)) == pytest.approx(4 / 20 + 0.013), "the node with fewer"
        assert cluster(between=90e9).seconds("gather", 4 * GB, (0, 1, 4, 5)) == pytest.approx(0.03), "NVLink limits it"
        assert seconds("all_to_all", 4 * GB, (0, 1, 4, 5)) == pytest.approx(0.3 + 0.012), "each rank its own"

    def test_a_collective_of_one_rank_takes_no_time(self) -> None:
        assert cluster(latency=1e-3).seconds("all_reduce", GB, (3,)) == 0.0

    def test_efficiency(self) -> None:
        link = Link(100e9, 0.0, efficiency=0.5)
        half = ClusterProfile(name="half", ranks_per_node=4, within_node=link, between_nodes=link)
        assert half.seconds("gather", 4 * GB, range(4)) == pytest.approx(0.06)

    def test_the_efficiency_of_a_group(self) -> None:
        """Of the largest number that the group has on a node: 3 of 4 ranks at 20 GB/s, 5 at 50; a send is of a pair."""
        within = Link(100e9, 0.0, efficiency=0.8, group_efficiency={3: 0.2, 5: 0.5})
        seconds = ClusterProfile(name="t", ranks_per_node=8, within_node=within, between_nodes=Link(1e12, 0.0)).seconds
        assert seconds("gather", 2 * GB, range(2)) == pytest.approx(1 / 80)
        assert seconds("gather", 4 * GB, range(4)) == pytest.approx(3 / 20)
        assert seconds("scatter", 8 * GB, range(8)) == pytest.approx(7 / 50)
        assert seconds("gather", 8 * GB, (0, 1, 2, 3, 8, 9, 10, 11)) == pytest.approx(7 / 20)
        assert seconds("send", GB, (0, 1)) == pytest.approx(1 / 80)

    @pytest.mark.parametrize(
        ("kind", "num_ranks", "num_bytes", "rate"),
        [
            ("gather", 8, 2**31, 401.9e9),
            ("gather", 4, 2**31, 443.1e9),
            ("gather", 2, 2**31, 550.0e9),
            ("scatter", 8, 2**31, 376.1e9),
            ("scatter", 4, 2**31, 383.2e9),
            ("scatter", 2, 2**31, 410.4e9),
            ("all_reduce", 8, 2**31, 230.0e9),
            ("all_reduce", 4, 2**31, 201.6e9),
            ("all_reduce", 2, 2**31, 250.3e9),
            ("gather", 8, 2**25, 259.4e9),
            ("scatter", 8, 2**25, 251.3e9),
            ("all_reduce", 8, 2**25, 148.5e9),
            ("all_reduce", 4, 2**25, 153.8e9),
            ("all_reduce", 2, 2**25, 178.7e9),
        ],
    )
    def test_collectives_over_nvlink_take_as_long_as_published(
        self, kind: Any, num_ranks: int, num_bytes: int, rate: float
    ) -> None:
        """Of H100s: the bytes of the whole result by second, as in the table that the profile names. See the profile.

        All kinds of collectives have one efficiency, and all sizes one latency.
        """
        seconds = load_cluster("dgx-h100").seconds(kind, num_bytes, range(num_ranks))
        assert seconds * rate / num_bytes == pytest.approx(1.0, abs=0.25)

    @pytest.mark.parametrize("kind", ["gather", "scatter", "all_reduce", "all_to_all", "broadcast", "send"])
    def test_more_bandwidth_takes_less_time(self, kind: str) -> None:
        for ranks in (range(2), (0, 4), (0, 1, 2, 3, 4)):
            for part in ({"within": 300e9}, {"between": 30e9}):
                assert cluster(**part).seconds(kind, GB, ranks) <= cluster().seconds(kind, GB, ranks)
            assert cluster(300e9, 30e9).seconds(kind, GB, ranks) < cluster().seconds(kind, GB, ranks)


class TestProfiles:
    @pytest.mark.parametrize("name", packaged_names("cluster"))
    def test_each_packaged_profile_is_valid(self, name: str) -> None:
        profile = load_cluster(name)
        assert profile.name == name
        text = (Path(graphckpt.__file__).parent / "simulation" / "clusters" / f"{name}.yaml").read_text()
        numbers = [line for line in text.splitlines() if any(digit in line.partition("#")[0] for digit in "0123456789")]
        assert all("#" in line for line in numbers if not line.startswith("name")), "each number has its source"

    def test_the_cluster_profile_of_a_device(self) -> None:
        names = {device: default_cluster(device).name for device in profile_names()}
        assert names["h100"] == "dgx-h100"
        assert names["a100-40g"] == names["a100-80g"] == "dgx-a100"
        assert names["rtx4090"] == names["cpu"] == "pcie"
        assert default_cluster(load_profile("h200").with_memory("24GiB").name).name == "dgx-h200"

    def test_the_file_of_the_guide(self, tmp_path: Path) -> None:
        text = Path("docs/howto/cluster.md").read_text().partition("```yaml\n")[2].partition("```")[0]
        (tmp_path / "mine.yaml").write_text(text)
        mine, packaged = load_cluster(tmp_path / "mine.yaml"), load_cluster("dgx-h100")
        assert (mine.within_node, mine.between_nodes) == (packaged.within_node, packaged.between_nodes)

    def test_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "own.yaml"
        path.write_text(
            "name: own\nranks_per_node: 2\nwithin_node: {bandwidth: 10.0e+9, latency: 0}\n"
            "between_nodes: {bandwidth: 1.0e+9, latency: 1.0e-5, efficiency: 0.5}\n"
        )
        profile = load_cluster(path)
        assert (profile.ranks_per_node, profile.between_nodes.rate, profile.within_node.efficiency) == (2, 0.5e9, 1.0)
        with FakeCluster(6, 3, profile) as rank:
            assert (rank.local_rank, torch.cuda.current_device()) == (1, 1)

    @pytest.mark.parametrize(
        ("line", "instead", "message"),
        [
            ("bandwidth: 10.0e+9", "bandwidth: 450", "within_node.bandwidth: expected bytes per second, such as"),
            ("bandwidth: 10.0e+9", "bandwidth: 450e9", "bytes per second, such as 50.0e+9, got '450e9'"),
            ("latency: 0", "latency: 4", "within_node.latency: expected seconds below 0.1, such as 4.0e-6, got 4"),
            ("bandwidth: 10.0e+9, ", "", "within_node.bandwidth: is missing"),
            ("bandwidth", "bandwith", "within_node.bandwith: unknown field · did you mean 'bandwidth'?"),
            ("ranks_per_node: 2\n", "", "ranks_per_node: is missing"),
            ("ranks_per_node: 2", "ranks_per_node: 2.5", "ranks_per_node: expected an int of 1 or more, got 2.5"),
            ("name: own", "name: own\nnodes: 4", "nodes: unknown field"),
            ("efficiency: 0.5", "efficiency: 50", "efficiency: expected a number above 0, at most 1, got 50"),
            ("name: own", "name: 3\ncomm_bytes: -1", "comm_bytes: expected a number from 0 on, got -1"),
            ("name: own", "name: 3", "name: expected text, got 3"),
        ],
    )
    def test_a_fault_of_a_file(self, tmp_path: Path, line: str, instead: str, message: str) -> None:
        text = (
            "name: own\nranks_per_node: 2\nwithin_node: {bandwidth: 10.0e+9, latency: 0}\n"
            "between_nodes: {bandwidth: 1.0e+9, latency: 1.0e-5, efficiency: 0.5}\n"
        )
        path = tmp_path / "own.yaml"
        path.write_text(text.replace(line, instead, 1))
        with pytest.raises(ConfigError) as error:
            load_cluster(path)
        assert message in str(error.value)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            (
                "pci",
                "cluster: unknown profile 'pci' · did you mean 'pcie'? · fix: use one of dgx-a100, dgx-b200",
            ),
            ("absent.yaml", "cluster: the file absent.yaml does not exist · fix: use one of"),
            (8, "cluster: expected the name of a profile, got 8 · fix: use one of"),
        ],
    )
    def test_a_name_that_is_unknown(self, name: str | int, message: str) -> None:
        for function in (graphckpt.plan, graphckpt.fit):
            with pytest.raises(ConfigError) as error:
                function(lambda *_: None, device="cpu", world_size=2, memory_budget="1GiB", cluster=name)  # type: ignore[operator]
            assert str(error.value).startswith(message)

    def test_a_cluster_needs_a_world_size(self) -> None:
        with pytest.raises(
            ConfigError, match="cluster: expected world_size with it, got 'pcie' alone · fix: world_size"
        ):
            graphckpt.plan(lambda: None, device="cpu", memory_budget="1GiB", cluster="pcie")  # type: ignore[arg-type, return-value]


def pipeline_seconds(stages: Sequence[tuple[float, float]], num_micro_batches: int) -> float:
    """Returns the seconds from the first forward to the last backward of a pipeline by the 1F1B schedule.

    Stage ``s`` of ``P`` runs ``P - s`` forwards before its first backward, and then one of each in turn. Each
    micro-batch waits for the stage before it, in backward for the one after it. Sends take no time.

    Args:
        stages: by stage, the seconds of the forward and of the backward of one micro-batch.
        num_micro_batches: those of one step.
    """
    num_stages = len(stages)
    ends: dict[tuple[int, bool, int], float] = {}  # by stage, whether it is a backward, and micro-batch
    orders = [_order(num_stages - stage, num_micro_batches) for stage in range(num_stages)]
    places, now = [0] * num_stages, [0.0] * num_stages
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        for stage, order in enumerate(orders):
            while places[stage] < len(order):
                is_backward, number = order[places[stage]]
                source = stage + 1 if is_backward else stage - 1
                arrival = ends.get((source, is_backward, number)) if 0 <= source < num_stages else 0.0
                if arrival is None:
                    break
                now[stage] = max(now[stage], arrival) + stages[stage][is_backward]
                ends[stage, is_backward, number] = now[stage]
                places[stage] += 1
    return max(now, default=0.0)


def _order(ahead: int, num_micro_batches: int) -> list[tuple[bool, int]]:
    """Returns the forwards and backwards of a stage that runs so many forwards before its first backward."""
    first = min(ahead, num_micro_batches)
    order = [(False, number) for number in range(first)]
    for number in range(num_micro_batches):
        order.append((True, number))
        if first + number < num_micro_batches:
            order.append((False, first + number))
    return order


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 4 * D, bias=False), nn.Linear(4 * D, D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(x).relu()).relu()
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(NUM_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def step_of(shard: Callable[[Model], object], num_rows: int = 4096) -> tuple[nn.Module, Callable[[], None]]:
    model = Model()
    shard(model)
    x = torch.randn(num_rows, D)

    def step() -> None:
        model(x).backward()
        for parameter in model.parameters():
            parameter.grad = None

    return model, step


def sharded(model: Model) -> None:
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)


def hybrid(model: Model) -> None:
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)


def tensor_parallel(model: Model) -> None:
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def planned(shard: Callable[[Model], object], profile: ClusterProfile, budget: str = "max", **more: Any) -> Plan:
    return graphckpt.plan(
        lambda: step_of(shard),
        device="h200",
        world_size=4,
        memory_budget=budget,
        cluster=profile,
        progress=False,
        **{"candidates": ["full"], **more},
    )


def planned_ddp(profile: ClusterProfile) -> Plan:
    def make() -> tuple[nn.Module, Callable[[], None]]:
        model = DistributedDataParallel(Model(), bucket_cap_mb=16, gradient_as_bucket_view=True)
        x = torch.randn(4096, D)

        def step() -> None:
            model(x).backward()
            model.zero_grad()

        return model, step

    return graphckpt.plan(
        make,
        device="h200",
        world_size=4,
        memory_budget="max",
        cluster=profile,
        progress=False,
        select="module.layers.*",
    )


BYTES = 2 * 4 * D * 4 * D  # of the weights of one layer, and of its gradients


class TestExposure:
    """4 layers on 4 ranks. Under FSDP2 each is gathered in forward and in backward, and its gradients are reduced."""

    def test_computation_hides_what_it_can(self) -> None:
        """The first all-gather and the last reduce-scatter have nothing beside them."""
        profile = cluster(within=1e12)
        each = profile.seconds("gather", BYTES, range(4))
        plan = planned(sharded, profile)
        compute = plan.predicted_step_seconds - plan.exposed_seconds
        assert compute / 12 > 1.5 * each, "a layer computes for longer than its collectives take"
        assert plan.communication_seconds == pytest.approx(12 * each)
        assert plan.exposed_seconds == pytest.approx(2 * each, rel=0.02)
        assert f"{plan.predicted_step_seconds * 1e3:.3g} ms" in str(plan)

    def test_a_slow_network_hides_computation(self) -> None:
        profile = cluster(within=1e9)
        plan = planned(sharded, profile)
        compute = plan.predicted_step_seconds - plan.exposed_seconds
        assert plan.communication_seconds > 10 * compute
        assert plan.predicted_step_seconds == pytest.approx(plan.communication_seconds, rel=0.1)
        assert plan.exposed_seconds > 0.9 * plan.communication_seconds

    def test_computation_does_not_depend_on_the_network(self) -> None:
        plans = [planned(sharded, cluster(within=bandwidth)) for bandwidth in (1e9, 10e9, 100e9, 1e12)]
        compute = [plan.predicted_step_seconds - plan.exposed_seconds for plan in plans]
        assert compute == pytest.approx([compute[0]] * 4)
        for slow, fast in pairwise(plans):
            assert fast.predicted_step_seconds < slow.predicted_step_seconds
            assert fast.exposed_seconds <= fast.communication_seconds < slow.communication_seconds

    def test_micro_batches_wait_for_their_gradients(self) -> None:
        """The last reduce-scatter of each backward is exposed, and the first all-gather of each forward."""
        profile = cluster(within=1e12)
        rank = FakeCluster(4, 0, profile)
        each = profile.seconds("gather", BYTES, range(4))
        machine = load_profile("h200")
        with rank:
            device = FakeDevice(machine, cluster=rank)
            with device.building():
                _, step = step_of(sharded)
            exposed = []
            for count in (1, 3):
                timeline = device.new_timeline()
                trace = AllocationTrace("meta", is_fake=True, op_seconds=timeline.op_seconds)
                with device:
                    step()
                    with timeline.waits(), trace:
                        for _ in range(count):
                            step()
                exposed.append(timeline.seconds().exposed)
        assert exposed == pytest.approx([2 * each, 6 * each], rel=0.02)

    def test_ddp_reduces_beside_backward(self) -> None:
        """4 layers of 32 MiB, each a bucket: the last one has nothing beside it."""

        profile = cluster(within=1e12)
        each = profile.seconds("all_reduce", BYTES, range(4))
        fast = planned_ddp(profile)
        assert fast.communication_seconds == pytest.approx(NUM_LAYERS * each)
        assert each / 2 - 1e-9 < fast.exposed_seconds < 1.5 * each, (
            "of the last layer, whose two weights are two buckets"
        )
        slow = planned_ddp(cluster(within=1e9))
        assert slow.exposed_seconds > 0.9 * slow.communication_seconds

    def test_hsdp_reduces_twice(self) -> None:
        """On a mesh of 2 x 2 ranks, the shards of gradients are reduced over the other dimension."""
        profile = cluster(within=1e12)
        plan = planned(hybrid, profile)
        gathers = 12 * profile.seconds("gather", BYTES, range(2))
        reductions = 4 * profile.seconds("all_reduce", BYTES / 2, (0, 2))
        assert plan.communication_seconds == pytest.approx(gathers + reductions)
        assert plan.exposed_seconds < 0.3 * plan.communication_seconds

    def test_full_repeats_the_collectives_of_tensor_parallelism(self) -> None:
        """Each block all-reduces its output once in forward, once in backward, and in the recomputation."""
        profile = cluster(within=1e9)
        each = profile.seconds("all_reduce", 4 * 4096 * D, range(4))
        keep = planned(tensor_parallel, profile)
        full = planned(tensor_parallel, profile, "min", candidates=["full"])
        recomputed = [row for row in full.rows if row.option == "full"]
        assert len(recomputed) > 1
        assert all(row.extra_seconds > each for row in recomputed), "which the planner compares"
        assert full.communication_seconds - keep.communication_seconds == pytest.approx(len(recomputed) * each)
        assert keep.exposed_seconds == pytest.approx(keep.communication_seconds), "none of it is beside computation"
        assert full.predicted_step_seconds - keep.predicted_step_seconds > len(recomputed) * each

    def test_plans_are_saved_with_the_seconds_of_their_collectives(self, tmp_path: Path) -> None:
        plan = planned(sharded, cluster())
        plan.save(tmp_path / "plan.yaml")
        loaded = Plan.load(tmp_path / "plan.yaml")
        assert (loaded.exposed_seconds, loaded.communication_seconds) == (
            plan.exposed_seconds,
            plan.communication_seconds,
        )
        names = ("exposed_seconds", "communication_seconds", "bubble_seconds")
        lines = (tmp_path / "plan.yaml").read_text().splitlines()
        (tmp_path / "old.yaml").write_text("\n".join(line for line in lines if line.split(":")[0].strip() not in names))
        assert Plan.load(tmp_path / "old.yaml").exposed_seconds == 0.0


class Timed:
    """A rank on which an op of computation takes 1 ms, and 1 GB takes 1 s."""

    def __init__(self, world_size: int = 4, slowdown: float = 0.0) -> None:
        link = Link(1e9, 0.0)
        profile = ClusterProfile(name="slow", ranks_per_node=4, within_node=link, between_nodes=link, slowdown=slowdown)
        self.cluster = FakeCluster(world_size, 0, profile)
        self.device = FakeDevice(load_profile("cpu"), cluster=self.cluster)

    def seconds(self, step: Callable[[], object]) -> tuple[float, float, float]:
        timeline = Timeline(lambda func, *_: 1e-3 * (func.namespace == "aten"), self.cluster.profile)
        trace = AllocationTrace("meta", is_fake=True, op_seconds=timeline.op_seconds)
        with self.device, timeline.waits(), trace:
            step()
        total, communication, exposed, _ = timeline.seconds()
        return round(total * 1e3, 6), round(communication * 1e3, 6), round(exposed * 1e3, 6)


def test_an_asynchronous_collective_runs_beside_computation_until_it_is_waited_for() -> None:
    """An all-reduce of 4 MB takes 2 x 3/4 x 4 ms."""
    rank = Timed()
    with rank.cluster:
        with rank.device:
            x, y = torch.ones(10**6), torch.ones(1)

        def asynchronous(num_ops: int, num_later: int = 0) -> None:
            work = dist.all_reduce(x, async_op=True)
            for _ in range(num_ops):
                y.neg()
            work.wait()
            for _ in range(num_later):
                y.neg()

        assert rank.seconds(lambda: asynchronous(2)) == (6.0, 6.0, 4.0)
        assert rank.seconds(lambda: asynchronous(8)) == (8.0, 6.0, 0.0)
        assert rank.seconds(lambda: asynchronous(2, 3)) == (9.0, 6.0, 4.0)

        def synchronous() -> None:
            dist.all_reduce(x)
            for _ in range(8):
                y.neg()

        assert rank.seconds(synchronous) == (14.0, 6.0, 6.0)

        def never_waited() -> None:
            dist.all_reduce(x, async_op=True)
            y.neg()

        assert rank.seconds(never_waited) == (6.0, 6.0, 5.0), "the step ends with it"

        def several() -> None:
            works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
            for _ in range(10):
                y.neg()
            for work in works:
                work.wait()

        assert rank.seconds(several) == (18.0, 18.0, 8.0), "one after another"

        def of_two_groups() -> None:
            other = dist.new_group([0, 1])
            works = [dist.all_reduce(x, async_op=True), dist.all_reduce(x, group=other, async_op=True)]
            for work in works:
                work.wait()

        assert rank.seconds(of_two_groups) == (6.0, 10.0, 6.0), "at the same time"


def test_computation_takes_longer_while_a_collective_runs_beside_it() -> None:
    rank = Timed(slowdown=0.5)
    with rank.cluster:
        with rank.device:
            x, y = torch.ones(10**6), torch.ones(1)

        def overlapped(num_ops: int, num_before: int = 0) -> None:
            for _ in range(num_before):
                y.neg()
            work = dist.all_reduce(x, async_op=True)
            for _ in range(num_ops):
                y.neg()
            work.wait()

        assert rank.seconds(lambda: overlapped(2)) == (6.0, 6.0, 3.0), "each op takes 1.5 ms"
        assert rank.seconds(lambda: overlapped(8)) == (10.0, 6.0, 0.0), "4 ops in these 6 ms, and 4 after it"
        assert rank.seconds(lambda: overlapped(2, 3)) == (9.0, 6.0, 3.0), "nothing slows the ops before it"


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_every_collective_has_its_bytes() -> None:
    """Of 4 ranks; a tensor of 1 MB takes 1 ms on a link."""
    rank = Timed()
    with rank.cluster:
        with rank.device:
            x, four = torch.ones(250_000), torch.ones(1_000_000)
            parts = [torch.ones(250_000) for _ in range(4)]
            others = [torch.ones(250_000) for _ in range(4)]
        from torch.distributed import _functional_collectives as functional  # noqa: PLC0415

        world = dist.group.WORLD
        calls: list[tuple[Callable[[], object], float]] = [
            (lambda: dist.all_reduce(four), 6.0),
            (lambda: dist.all_gather(parts, x), 3.0),
            (lambda: dist.all_gather_into_tensor(four, x), 3.0),
            (lambda: dist.reduce_scatter_tensor(x, four), 3.0),
            (lambda: dist.reduce_scatter(x, parts), 3.0),
            (lambda: dist.broadcast(four, 0), 4.0),
            (lambda: dist.reduce(four, 0), 4.0),
            (lambda: dist.all_to_all_single(torch.empty_like(four), four), 3.0),
            (lambda: dist.all_to_all(parts, others), 3.0),
            (lambda: dist.gather(x, parts), 4.0),
            (lambda: dist.scatter(x, parts), 4.0),
            (lambda: dist.send(x, 1), 1.0),
            (lambda: dist.recv(x, 1), 1.0),
            (dist.barrier, 0.0),
            (lambda: functional.all_reduce(four, "sum", world), 6.0),
            (lambda: functional.all_gather_tensor(x, 0, world), 3.0),
            (lambda: functional.reduce_scatter_tensor(four, "sum", 0, world), 3.0),
            (lambda: functional.all_to_all_single(four, None, None, world), 3.0),
            (lambda: functional.broadcast(four, 0, world), 4.0),
            (lambda: functional.all_reduce_coalesced([x, x], "sum", world), 3.0),
            (lambda: functional.all_gather_into_tensor_coalesced([x, x], world), 6.0),
            (lambda: functional.reduce_scatter_tensor_coalesced([four, four], "sum", [0, 0], world), 6.0),
        ]
        for number, (call, milliseconds) in enumerate(calls):
            assert rank.seconds(call)[1] == pytest.approx(milliseconds), number


def test_an_unknown_collective_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from graphckpt.simulation import timeline  # noqa: PLC0415

    monkeypatch.delitem(timeline._KINDS, "allreduce")
    rank = Timed()
    with rank.cluster:
        with rank.device:
            x = torch.ones(8)
        with pytest.raises(ConfigError, match="the step calls c10d::allreduce_, whose time on a cluster is not known"):
            rank.seconds(partial(dist.all_reduce, x))


def stage_of(num_micro_batches: int) -> Callable[[], tuple[nn.Module, Callable[[], None]]]:
    def make() -> tuple[nn.Module, Callable[[], None]]:
        rank, num_stages = dist.get_rank(), dist.get_world_size()
        hidden = torch.empty(256, D, device="meta", requires_grad=True)
        module = stack_of(Block, NUM_LAYERS)
        stage = PipelineStage(module, rank, num_stages, torch.device("cpu"), input_args=hidden, output_args=hidden)
        schedule = Schedule1F1B(stage, num_micro_batches, loss_fn=nn.functional.mse_loss)
        rows = 256 * num_micro_batches
        inputs = [torch.randn(rows, D)] if rank == 0 else []
        target = {"target": torch.randn(rows, D)} if rank == num_stages - 1 else {}

        def step() -> None:
            schedule.step(*inputs, **target)
            module.zero_grad()

        return module, step

    return make


class TestPipeline:
    def test_the_plan_of_a_stage_has_its_bubble(self) -> None:
        """On stage 1 of 4 each micro-batch is received and sent, and so are its gradients."""
        profile = cluster(within=100e9)
        plans = {}
        for count in (4, 8):
            plans[count] = plan = graphckpt.plan(
                stage_of(count), device="h200", world_size=4, rank=1, cluster=profile, memory_budget="max",
                candidates=["full"], select="*",
            )  # fmt: skip
            busy = plan.predicted_step_seconds - plan.bubble_seconds
            assert plan.bubble_seconds == pytest.approx(busy * 3 / count)
            assert plan.predicted_step_seconds == pytest.approx(plan.plain_step_seconds, rel=0.01)
            transfers = 4 * count * profile.seconds("send", 4 * 256 * D, (0, 1))
            assert plan.communication_seconds == pytest.approx(transfers)
            assert "in the pipeline's bubble" in " ".join(str(plan).split())
        assert plans[8].predicted_step_seconds < 2 * plans[4].predicted_step_seconds
        full = graphckpt.plan(
            stage_of(8), device="h200", world_size=4, rank=1, cluster=profile, memory_budget="min", candidates=["full"],
            select="*",
        )  # fmt: skip
        assert full.predicted_step_seconds - full.bubble_seconds > plans[8].predicted_step_seconds * 8 / 11
        extra = sum(row.extra_seconds for row in full.rows)
        assert full.predicted_step_seconds - full.plain_step_seconds == pytest.approx(extra, rel=0.05)

    def test_equal_stages(self) -> None:
        for num_stages in (1, 2, 5):
            for count in (1, 2, 5, 9):
                whole = pipeline_seconds([(1.0, 2.0)] * num_stages, count)
                assert whole == pytest.approx(3 * (count + num_stages - 1))
                assert whole == pytest.approx(3 * count + bubble_seconds(3 * count, num_stages, count))

    def test_by_hand(self) -> None:
        """Stage 1 runs F0 B0 F1 B1 from 1 on, each after what stage 0 or itself has sent.

        ::

            stage 0: F0 F1 .. .. .. .. B0 B0 .. .. B1 B1
            stage 1:    F0 F0 B0 B0 B0 F1 F1 ...
        """
        assert pipeline_seconds([(1, 2), (2, 3)], 1) == 1 + 2 + 3 + 2
        assert pipeline_seconds([(1, 2), (2, 3)], 2) == 1 + 2 * (2 + 3) + 2
        assert pipeline_seconds([(4, 2), (1, 1)], 2) == 4 + 4 + 1 + 1 + 2  # of the first stage, whose forwards are long

    def test_a_pipeline_takes_at_least_as_long_as_its_slowest_stage(self) -> None:
        stages = [(1.0, 2.0), (2.0, 2.5), (0.5, 1.0)]
        for count in range(1, 8):
            seconds = pipeline_seconds(stages, count)
            assert max(count * sum(stage) for stage in stages) < seconds <= count * sum(map(sum, stages))

    def test_no_stage(self) -> None:
        assert pipeline_seconds([], 4) == 0.0
