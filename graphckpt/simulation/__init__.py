"""Devices, allocators and clusters that are absent: what a step would allocate there, and how long it would take.

It knows no plan. A step runs on the fake tensors of a :class:`~graphckpt.simulation.fake_device.FakeDevice`, perhaps
as one rank of a :class:`~graphckpt.simulation.fake_cluster.FakeCluster`. A trace of its allocations is replayed in the
rules of PyTorch's caching allocator (``allocations``, ``allocator``); ops, copies and collectives take the seconds that
profiles of the device and of its links say (``profile``, ``cluster_profile``, ``timeline``).
"""
