"""Cluster profiles: the nodes of a cluster and their links, by name or from a file, and the seconds of a collective.

A profile is a YAML file with the fields of :class:`ClusterProfile`. Data sheets state peak rates, so each link has an
efficiency; a measured rate has efficiency 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, final

from graphckpt.errors import ConfigError, bullets
from graphckpt.simulation.profile_files import is_number, read_profile, value_faults
from graphckpt.units import format_bytes

CollectiveKind: TypeAlias = Literal["gather", "scatter", "all_reduce", "all_to_all", "broadcast", "send", "barrier"]
"""``"gather"`` is an all-gather, ``"scatter"`` a reduce-scatter; ``"broadcast"`` is also a reduction to one rank."""

_LINKS = ("within_node", "between_nodes")
# Bytes per second and seconds: a smaller bandwidth is in GB/s, and a larger latency in microseconds.
_LEAST_BANDWIDTH = 1e6
_MOST_LATENCY = 0.1
_CLUSTER_OF_DEVICE = {
    "a100-40g": "dgx-a100",
    "a100-80g": "dgx-a100",
    "h100": "dgx-h100",
    "h200": "dgx-h200",
    "b200": "dgx-b200",
}
_CLUSTER_OF_OTHERS = "pcie"


@final
@dataclass(frozen=True)
class Link:
    """The rates between two ranks, which send and receive at the same time."""

    bandwidth: float
    """Bytes per second that a rank sends."""
    latency: float
    """Seconds that each hop takes, whatever it carries."""
    _: KW_ONLY
    efficiency: float = 1.0
    """The share of the bandwidth that collectives reach."""
    group_efficiency: Mapping[int, float] = field(default_factory=dict)
    """The same for a group by its ranks on a node, in place of ``efficiency``: of the largest number that it has."""

    @property
    def rate(self) -> float:
        return self.bandwidth * self.efficiency

    def rate_of(self, num_ranks: int) -> float:
        """Returns the bytes per second that each rank of a ring sends.

        >>> link = Link(450e9, 0.0, efficiency=0.5, group_efficiency={2: 0.2, 4: 0.4})
        >>> [round(link.rate_of(size) / 450e9, 1) for size in (1, 2, 3, 4, 8)]
        [0.5, 0.2, 0.2, 0.4, 0.4]
        """
        number = max((each for each in self.group_efficiency if each <= num_ranks), default=None)
        return self.rate if number is None else self.bandwidth * self.group_efficiency[number]


@final
@dataclass(frozen=True, kw_only=True)
class ClusterProfile:
    """The nodes of a cluster, which are alike. Rank ``r`` is on node ``r // ranks_per_node``.

    >>> cluster = load_cluster("dgx-h100")
    >>> seconds = cluster.seconds("gather", 8 * 10**9, range(8))  # of 8 GB, of which a rank receives 7
    >>> round(seconds * 0.8 * 450e9 / 1e9, 1)
    7.0
    """

    name: str
    ranks_per_node: int
    within_node: Link
    between_nodes: Link
    slowdown: float = 0.0
    """How much longer computation takes while a collective runs beside it, as a share of its time."""
    comm_bytes: int = 0
    """Device memory that NCCL takes for each group of which a rank is a member, which no plan counts."""

    def __post_init__(self) -> None:
        faults = _faults(self)
        if faults:
            raise ConfigError(bullets(f"cluster profile {self.name!r}", faults))

    def describe(self) -> str:
        within, between = self.within_node, self.between_nodes
        shares = " and ".join(dict.fromkeys(f"{100 * link.efficiency:g} %" for link in (within, between)))
        sizes = [f"{100 * share:g} % in groups of {size}" for size, share in within.group_efficiency.items()]
        groups = f" (within a node {', '.join(sizes)})" if sizes else ""
        slower = f"; computation takes {100 * self.slowdown:.3g} % longer beside them" if self.slowdown else ""
        return (
            f"the {self.name} profile: {self.ranks_per_node} ranks in a node, {within.bandwidth / 1e9:.3g} GB/s for "
            f"each within it and {between.bandwidth / 1e9:.3g} GB/s between nodes, of which collectives reach {shares}"
            f"{groups}{slower}"
        )

    def seconds(self, kind: CollectiveKind, num_bytes: float, ranks: Sequence[int]) -> float:
        """Returns the seconds of a collective, as by NCCL's rings, which start when all ranks have called it.

        Args:
            kind: a send has two ranks, and the bytes pass one link.
            num_bytes: of the whole result of an all-gather, of what each rank passes to any other collective.
            ranks: the members of the group, as numbers of all ranks.
        """
        size = len(ranks)
        if size < 2:
            return 0.0
        per_node = Counter(rank // self.ranks_per_node for rank in ranks)
        within, between, num_nodes = self.within_node, self.between_nodes, len(per_node)
        rate, pair_rate = within.rate_of(max(per_node.values())), within.rate
        if num_nodes > 1:
            pair_rate = min(within.rate, between.rate)
            # A ring leaves a node once. As many rings as the group has ranks on a node use the adapters of all of them.
            rate = min(rate, min(per_node.values()) * between.rate)
        # Each chunk passes all ranks one after another, most of them on the same node: ranks 0, 1, 8 and 9 with 8 on a
        # node are two hops within nodes and one between them.
        latency = (size - num_nodes) * within.latency + (num_nodes - 1) * between.latency
        share = (size - 1) / size
        if kind == "barrier":
            return 2 * latency
        if kind in ("broadcast", "send"):
            return num_bytes / (pair_rate if kind == "send" else rate) + latency
        if kind == "all_to_all":  # what a rank sends to other nodes passes its adapter
            return share * num_bytes / pair_rate + latency
        # An all-reduce is a reduce-scatter and an all-gather. Each rank keeps its own share, and passes the rest on.
        rounds = 2 if kind == "all_reduce" else 1
        return rounds * (share * num_bytes / rate + latency)


Cluster: TypeAlias = str | Path | ClusterProfile | None
"""The values of ``cluster``: the name of a profile, a file, a profile, or ``None`` for that of the device."""


def load_cluster(name_or_path: str | Path | ClusterProfile) -> ClusterProfile:
    """Returns a cluster by the name of its packaged profile, or from a profile file.

    Raises:
        ConfigError: The profile does not exist, or has invalid values; the message lists all of them.
    """
    if isinstance(name_or_path, ClusterProfile):
        return name_or_path
    values = read_profile("cluster", ClusterProfile, name_or_path, parts=dict.fromkeys(_LINKS, Link))
    return ClusterProfile(**values)


def default_cluster(device_name: str) -> ClusterProfile:
    """Returns the packaged cluster of a device profile: a DGX for its GPUs, and otherwise nodes without NVLink.

    >>> default_cluster("h200").name, default_cluster("rtx4090").name
    ('dgx-h200', 'pcie')
    """
    plain = device_name.partition(" ")[0]  # of "h200 of 24.0 GiB"
    return load_cluster(_CLUSTER_OF_DEVICE.get(plain, _CLUSTER_OF_OTHERS))


def cluster_note(profile: ClusterProfile) -> str:
    """Returns the note of a plan about the communication that it has assumed."""
    buffers = f"NCCL takes about {format_bytes(profile.comm_bytes)} for each group, outside the allocator"
    return f"communication as on {profile.describe()}; {buffers}"


def _faults(cluster: ClusterProfile) -> list[str]:
    faults = [*value_faults(cluster, from_zero=("comm_bytes", "slowdown"))]
    untyped = vars(cluster)  # of a file, in which a value may be of any type
    size = untyped["ranks_per_node"]
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        faults.append(f"ranks_per_node: expected an int of 1 or more, got {size!r}")
    for name in _LINKS:
        if not isinstance(untyped[name], Link):
            faults.append(f"{name}: expected a Link, got {untyped[name]!r}")
            continue
        bandwidth, latency, efficiency = (vars(untyped[name])[key] for key in ("bandwidth", "latency", "efficiency"))
        if not is_number(bandwidth) or bandwidth < _LEAST_BANDWIDTH:
            faults.append(f"{name}.bandwidth: expected bytes per second, such as 50.0e+9, got {bandwidth!r}")
        if not is_number(latency) or not 0 <= latency < _MOST_LATENCY:
            faults.append(f"{name}.latency: expected seconds below {_MOST_LATENCY}, such as 4.0e-6, got {latency!r}")
        groups = vars(untyped[name])["group_efficiency"]
        is_map = isinstance(groups, dict) and all(type(size) is int and size > 1 for size in groups)
        if not is_map or not all(is_number(share) and 0 < share <= 1 for share in groups.values()):
            example = "shares by numbers of ranks, such as {2: 0.6, 8: 0.8}"
            faults.append(f"{name}.group_efficiency: expected {example}, got {groups!r}")
        if not is_number(efficiency) or not 0 < efficiency <= 1:
            faults.append(f"{name}.efficiency: expected a number above 0, at most 1, got {efficiency!r}")
    return faults
