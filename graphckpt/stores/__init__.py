"""Stores that hold saved tensors between forward and backward."""

from graphckpt.stores.base import (
    ByteHandle,
    ByteStore,
    DeviceStore,
    Offload,
    Store,
    TensorGroup,
    Traffic,
    offload_targets,
    parse_offload,
)
from graphckpt.stores.disk import Disk
from graphckpt.stores.host import Host
from graphckpt.stores.partition import Partition, parse_partition
from graphckpt.stores.placement import Placement, parse_contiguous, parse_min_elements, placement_of

__all__ = [
    "ByteHandle",
    "ByteStore",
    "DeviceStore",
    "Disk",
    "Host",
    "Offload",
    "Partition",
    "Placement",
    "Store",
    "TensorGroup",
    "Traffic",
    "offload_targets",
    "parse_contiguous",
    "parse_min_elements",
    "parse_offload",
    "parse_partition",
    "placement_of",
]
