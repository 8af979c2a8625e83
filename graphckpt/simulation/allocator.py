"""PyTorch's caching allocator on integers: the memory that it reserves for a sequence of allocations. No torch.

The rules are those of ``c10/core/AllocatorConfig.h`` and ``c10/cuda/CUDACachingAllocator.cpp`` of torch 2.11 to 2.13.
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self, final

# Note [Where the rules are]
# In CUDACachingAllocator.cpp, to compare with another release:
#
#     allocate                 malloc: the order of attempts
#     _best_fit                get_free_block, with the exceptions for blocks that are not split
#     _new_block               get_allocation_size and alloc_block
#     _splits                  should_split
#     _add_merged              free_block and try_merge_blocks
#     _release_oversized       release_available_cached_blocks
#     release_free_segments    release_cached_blocks
#     _expanded, _lowest_room  try_allocate_expandable_block and find_expandable_block (pytorch#96995)
#     _map, _unmap             map_block and unmap_block

# Note [An example]
# Tensors that a new process allocates one after another, in MiB:
#
#     tensor   allocated so far   reserved, and why                              reserved by expandable segments
#     0.25      0.25               2  a segment for small tensors                 2
#     1         1.25               2  in the rest of it                           2
#     3         4.25              22  20 for any tensor below 10                 22
#     9        13.25              22  in the rest of these 20                    22
#     12       25.25              34  12: from 10 on, rounded up to 2 alone      42  a second page of 20
#     25       51.25              60  26, of which the rest of 1 stays with its  62  one page more; 50.25 are
#                                     block, and counts as allocated                 allocated here

_MiB = 2**20
MIN_BLOCK = 512  # kMinBlockSize: sizes are rounded up to multiples of it
SMALL = 1 * _MiB  # kSmallSize: up to here from segments of SMALL_SEGMENT
SMALL_SEGMENT = 2 * _MiB  # kSmallBuffer
MIN_LARGE = 10 * _MiB  # kMinLargeAlloc: below it from segments of LARGE_SEGMENT
LARGE_SEGMENT = 20 * _MiB  # kLargeBuffer
ROUND_LARGE = 2 * _MiB  # kRoundLarge: larger segments are rounded up to multiples of it
_ENDLESS = 1 << 60  # bytes of addresses of an expandable segment; PyTorch reserves 9/8 of the memory (pytorch#192269)

_ENVIRONMENT = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is the name before torch 2.9


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def up_to_blocks(num_bytes: int) -> int:
    """Returns the bytes that the allocator counts for a tensor of ``num_bytes``."""
    return round_up(num_bytes, MIN_BLOCK)


@final
class CapacityError(Exception):
    """An allocation does not fit, even once all free segments are released.

    ``refused_bytes`` are those of the allocator: see :attr:`CachingAllocator.refused_bytes`.
    """

    def __init__(self, num_bytes: int, refused_bytes: int) -> None:
        super().__init__(num_bytes, refused_bytes)
        self.refused_bytes = refused_bytes


@final
@dataclass(frozen=True, kw_only=True)
class AllocatorRules:
    """The settings of ``PYTORCH_ALLOC_CONF`` that change which memory is reserved.

    >>> AllocatorRules.of("expandable_segments:True,max_split_size_mb:128").max_split_bytes
    134217728
    """

    expandable_segments: bool = False
    """Grow one segment for each stream and kind of size, instead of reserving segments of the size of allocations."""
    max_split_bytes: int | None = None
    """Larger blocks are not split; ``None`` splits all."""
    ignored: tuple[str, ...] = ()
    """The other settings that change it, which are not simulated."""

    @classmethod
    def of(cls, text: str) -> Self:
        """Parses a value of ``PYTORCH_ALLOC_CONF``. What torch itself refuses is ignored."""
        values = dict(entry.strip().split(":", 1) for entry in text.split(",") if ":" in entry)
        split = values.get("max_split_size_mb", "").strip()
        return cls(
            expandable_segments=values.get("expandable_segments", "").strip() == "True",
            max_split_bytes=int(split) * _MiB if split.isdigit() else None,
            ignored=tuple(name for name in values if name in _NOT_SIMULATED),
        )

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        return cls.of(next((environment[name] for name in _ENVIRONMENT if environment.get(name)), ""))


DEFAULT_RULES = AllocatorRules()
_NOT_SIMULATED = (
    "roundup_power2_divisions", "garbage_collection_threshold", "backend", "max_non_split_rounding_mb",
    "large_segment_size_mb", "per_process_memory_fraction",
)  # fmt: skip


@final
class SegmentBlock:
    """A range of a segment. Blocks of a segment are a list, in the order of their addresses."""

    __slots__ = ("address", "is_free", "is_mapped", "next", "pool", "previous", "size")

    def __init__(self, pool: _Pool, address: int, size: int, *, is_mapped: bool = True) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.is_free = True
        self.is_mapped = is_mapped
        self.previous: SegmentBlock | None = None
        self.next: SegmentBlock | None = None

    @property
    def is_segment(self) -> bool:
        return self.previous is None and self.next is None

    def splice(self, previous: SegmentBlock | None, following: SegmentBlock | None) -> None:
        """Inserts the block between its neighbours."""
        self.previous, self.next = previous, following
        if previous is not None:
            previous.next = self
        if following is not None:
            following.previous = self


@final
@dataclass(eq=False, slots=True)
class _Pool:
    """The blocks of one stream, of small or of large sizes."""

    is_small: bool
    free: list[tuple[int, int]] = field(default_factory=list)
    """Size and address of each free block that is mapped, in ascending order."""
    blocks: dict[int, SegmentBlock] = field(default_factory=dict)
    """The first block of each segment, and those in :attr:`free` and :attr:`unmapped`, by address."""
    unmapped: list[int] = field(default_factory=list)
    """Addresses of the ranges of expandable segments without memory, in ascending order."""

    def add(self, block: SegmentBlock) -> None:
        self.blocks[block.address] = block
        if block.is_mapped:
            insort(self.free, (block.size, block.address))
        else:
            insort(self.unmapped, block.address)

    def remove(self, block: SegmentBlock) -> None:
        del self.blocks[block.address]
        if block.is_mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, block.address)]


@final
class CachingAllocator:
    """Reserves segments as PyTorch does, and counts them.

    Args:
        rules: Settings of the allocator.
        capacity: The most bytes that may be reserved; ``None`` is without a limit.

    >>> allocator = CachingAllocator()
    >>> block = allocator.allocate(3 * 2**20)
    >>> allocator.allocated_bytes, allocator.reserved_bytes
    (3145728, 20971520)
    >>> allocator.free(block)
    >>> allocator.allocated_bytes, allocator.reserved_bytes
    (0, 20971520)
    """

    def __init__(self, rules: AllocatorRules = DEFAULT_RULES, capacity: int | None = None) -> None:
        self.rules = rules
        self.capacity = capacity
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0
        self.allocated_bytes = 0
        """Bytes of blocks in use, with what their rounding wastes, as ``torch.cuda.memory_allocated`` counts."""
        self.peak_allocated_bytes = 0
        self.num_retries = 0
        """How often free segments were released because there was no memory for another one."""
        self.refused_bytes = 0
        """The least capacity with which a refused segment would have been reserved; 0 if none was refused. With any
        capacity from :attr:`peak_reserved_bytes` to just below it, it does the same as with the present one."""
        self._pools: dict[tuple[int, int, bool], _Pool] = {}
        self._end = LARGE_SEGMENT  # the next free address; addresses only order blocks of equal size

    def allocate(self, num_bytes: int, *, stream: int = 0, private_pool: int = 0) -> SegmentBlock:
        """Returns a block of at least ``num_bytes``, which must be above 0.

        Args:
            num_bytes: The size of the tensor.
            stream: The stream of the allocation; each has separate blocks.
            private_pool: That of a capture; 0 is the pool of all other allocations.

        Raises:
            CapacityError: It does not fit into :attr:`capacity`.
        """
        # The order of attempts decides what is reserved: a free block, a new segment, one after oversized blocks are
        # released, and one after all free segments are, which waits for the device.
        size = max(MIN_BLOCK, up_to_blocks(num_bytes))
        pool = self._pool(stream, private_pool, is_small=size <= SMALL)
        block = self._best_fit(pool, size) or self._new_block(pool, size)
        if block is None and self._release_oversized(pool, size):
            block = self._new_block(pool, size)
        if block is None:
            self.num_retries += 1
            self.release_free_segments()
            block = self._new_block(pool, size)
        if block is None:
            raise CapacityError(num_bytes, self.refused_bytes)
        rest = block.size - size
        if self._splits(pool, size, rest):
            remainder = SegmentBlock(pool, block.address + size, rest)
            remainder.splice(block, block.next)
            block.size = size
            pool.add(remainder)
        block.is_free = False
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: SegmentBlock) -> None:
        """Returns a block to its pool. Its segment stays reserved."""
        self.allocated_bytes -= block.size
        block.is_free = True
        self._add_merged(block)

    def release_free_segments(self) -> None:
        """Releases segments that are free as a whole, and free pages of expandable ones: ``torch.cuda.empty_cache``."""
        for pool in self._pools.values():
            for _, address in list(pool.free):
                block = pool.blocks[address]
                if self.rules.expandable_segments:
                    self._unmap(block)
                elif block.is_segment:
                    pool.remove(block)
                    self.reserved_bytes -= block.size

    def _pool(self, stream: int, private_pool: int, *, is_small: bool) -> _Pool:
        key = stream, private_pool, is_small
        if key not in self._pools:
            self._pools[key] = _Pool(is_small)
        return self._pools[key]

    def _splits(self, pool: _Pool, size: int, rest: int) -> bool:
        # A remainder of at most SMALL stays with its block, and counts as allocated: large blocks would otherwise leave
        # pieces that only small tensors fit, which have a pool of their own.
        if pool.is_small or self.rules.expandable_segments:
            return rest >= MIN_BLOCK
        return rest > SMALL and not self._is_oversized(size)

    def _is_oversized(self, size: int) -> bool:
        return self.rules.max_split_bytes is not None and size >= self.rules.max_split_bytes

    def _best_fit(self, pool: _Pool, size: int) -> SegmentBlock | None:
        """Removes the smallest free block of a pool that is large enough; of equal ones, that at the lowest address."""
        at = bisect_left(pool.free, (size, 0))
        if at == len(pool.free):
            return None
        if self.rules.expandable_segments:
            at = self._least_expandable(pool, at)
        block = pool.blocks[pool.free[at][1]]
        # An oversized block is never split: a smaller tensor would get all of it, and an oversized one far too much.
        if self.rules.max_split_bytes is not None and not pool.is_small and not self.rules.expandable_segments:
            is_oversized = self._is_oversized(size)
            if self._is_oversized(block.size) != is_oversized or (is_oversized and block.size >= size + LARGE_SEGMENT):
                return None
        pool.remove(block)
        return block

    def _least_expandable(self, pool: _Pool, at: int) -> int:
        """Prefers blocks that cannot grow: a block before unmapped memory counts with that memory."""

        def size_of(entry: tuple[int, int]) -> int:
            block = pool.blocks[entry[1]]
            following = block.next
            return block.size + (following.size if following is not None and not following.is_mapped else 0)

        # As in PyTorch the search ends at the first that is not smaller, which need not be the least of all.
        while at + 1 < len(pool.free) and size_of(pool.free[at + 1]) < size_of(pool.free[at]):
            at += 1
        return at

    def _new_block(self, pool: _Pool, size: int) -> SegmentBlock | None:
        if self.rules.expandable_segments:
            return self._expanded(pool, size)
        if pool.is_small:
            num_bytes = SMALL_SEGMENT
        elif size < MIN_LARGE:
            num_bytes = LARGE_SEGMENT
        else:
            num_bytes = round_up(size, ROUND_LARGE)
        if not self._reserve(num_bytes):
            return None
        block = SegmentBlock(pool, self._end, num_bytes)
        # Apart, as blocks of two segments never merge, even where the driver returns neighbouring addresses.
        self._end += num_bytes + LARGE_SEGMENT
        return block

    def _reserve(self, num_bytes: int) -> bool:
        needed = self.reserved_bytes + num_bytes
        if self.capacity is not None and needed > self.capacity:
            self.refused_bytes = min(self.refused_bytes or needed, needed)
            return False
        self.reserved_bytes = needed
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _release_oversized(self, pool: _Pool, size: int) -> bool:
        """Releases free blocks that are never split until there is room for ``size``; returns whether there is."""
        threshold = self.rules.max_split_bytes
        if threshold is None or self.rules.expandable_segments:
            return False
        num_bytes = max(size, threshold)
        # One block that is large enough, else the largest ones: each release is a call of the driver, which waits.
        at = bisect_left(pool.free, (num_bytes, 0))
        blocks = [pool.blocks[address] for _, address in pool.free]
        released = blocks[at : at + 1]
        if not released:
            for block in reversed([block for block in blocks if block.size >= threshold]):
                released.append(block)
                if sum(one.size for one in released) >= num_bytes:
                    break
        for block in released:
            pool.remove(block)
            self.reserved_bytes -= block.size
        return sum(block.size for block in released) >= num_bytes

    def _add_merged(self, block: SegmentBlock) -> None:
        """Adds a free block to its pool, merged with the free blocks next to it."""
        pool = block.pool
        if (before := block.previous) is not None and before.is_free and before.is_mapped == block.is_mapped:
            pool.remove(before)
            block.address = before.address
            block.size += before.size
            block.splice(before.previous, block.next)
        if (after := block.next) is not None and after.is_free and after.is_mapped == block.is_mapped:
            pool.remove(after)
            block.size += after.size
            block.splice(block.previous, after.next)
        pool.add(block)

    # Expandable segments: one range of addresses for each pool, of which pages get memory

    def _expanded(self, pool: _Pool, size: int) -> SegmentBlock | None:
        """Maps pages from the lowest address on at which ``size`` bytes are free or unmapped."""
        block = self._lowest_room(pool, size)
        while not block.is_mapped or block.size < size:
            room, missing = (block.next, size - block.size) if block.is_mapped else (block, size)
            assert room is not None
            mapped = self._map(room, min(room.size, missing))  # which merges with the block before it
            if mapped is None:
                return None
            block = mapped
        pool.remove(block)
        return block

    def _lowest_room(self, pool: _Pool, size: int) -> SegmentBlock:
        # From each unmapped range on, with the free block before it: neighbours that are free, mapped or not, count
        # until one in use follows.
        for address in pool.unmapped:
            block = pool.blocks[address]
            if block.previous is not None and block.previous.is_free:
                block = block.previous
            room, following = 0, block if block.is_free else None
            while following is not None and following.is_free and room < size:
                room += following.size
                following = following.next
            if room >= size:
                return block
        # Once for each pool: the addresses of its range do not end.
        self._end += LARGE_SEGMENT
        block = SegmentBlock(pool, self._end, _ENDLESS, is_mapped=False)
        self._end += _ENDLESS
        pool.add(block)
        return block

    def _map(self, block: SegmentBlock, size: int) -> SegmentBlock | None:
        """Gives memory to the first pages of an unmapped range; returns the free block in the pool with them."""
        pool = block.pool
        page = SMALL_SEGMENT if pool.is_small else LARGE_SEGMENT
        num_bytes = round_up(size, page)
        if not self._reserve(num_bytes):
            return None
        pool.remove(block)
        if num_bytes < block.size:
            rest = SegmentBlock(pool, block.address + num_bytes, block.size - num_bytes, is_mapped=False)
            rest.splice(block, block.next)
            pool.add(rest)
        block.size, block.is_mapped = num_bytes, True
        self._add_merged(block)
        return block

    def _unmap(self, block: SegmentBlock) -> None:
        """Takes the memory of the pages that are free as a whole."""
        pool = block.pool
        page = SMALL_SEGMENT if pool.is_small else LARGE_SEGMENT
        # Pages are counted from the start of the segment: a block that begins within one leaves the rest of it mapped.
        # Of a free block from 15 to 65 MiB the pages from 20 to 60 are unmapped; 15 to 20 and 60 to 65 stay, as two.
        start = self._start_of_pages(block)
        begin = start + round_up(block.address - start, page)
        end = start + (block.address + block.size - start) // page * page
        if end <= begin:
            return
        pool.remove(block)
        if begin > block.address:
            before = SegmentBlock(pool, block.address, begin - block.address)
            before.splice(block.previous, block)
            pool.add(before)
        if end < block.address + block.size:
            after = SegmentBlock(pool, end, block.address + block.size - end)
            after.splice(block, block.next)
            pool.add(after)
        block.address, block.size, block.is_mapped = begin, end - begin, False
        self.reserved_bytes -= block.size
        self._add_merged(block)

    @staticmethod
    def _start_of_pages(block: SegmentBlock) -> int:
        first = block
        while first.previous is not None:
            first = first.previous
        return first.address
