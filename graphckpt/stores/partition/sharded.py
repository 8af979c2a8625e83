"""Cuts tensors that are equal on all ranks of a group into one slice for each rank, and gathers them for backward."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, final

import torch

from graphckpt._compat import assert_on_device
from graphckpt.errors import StoreError
from graphckpt.stores.byte_store import Place, Ticket
from graphckpt.stores.partition.replica_check import Replicas, probe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphckpt.stores.base import Group
    from graphckpt.stores.partition.ranks import Arrival, Ranks

# Note [Same calls on all ranks]
# Collectives match by their order. Which groups are sent for, and when, follows from what a step keeps and asks for, so
# ranks that run the same blocks on the same shapes issue the same gathers. That they do is checked on the first call of
# each block and run of sizes, by words that cannot get out of step (`Ranks.exchange`). From then on each rank compares
# what it gathers with what it kept, by a few words of it: ranks may be given other data later on, or another order.

_ALIGN = 16  # bytes; slices begin where vectorised kernels may load


@final
class _Cut(Ticket):
    """A piece, as this rank keeps it. Until the ranks were asked whether it is equal on all of them it stays whole."""

    __slots__ = ("_arrival", "_run", "inner", "is_cut", "probe", "slice", "whole")

    def __init__(self, data: torch.Tensor) -> None:
        super().__init__(data.numel())
        self.whole: torch.Tensor | None = data
        """All bytes, an alias of the tensor's own memory."""
        self.is_cut = False
        self.slice: torch.Tensor | None = None
        """This rank's bytes, if no other place holds them."""
        self.inner: Ticket | None = None
        """What the place beneath holds: this rank's bytes, or all of them."""
        self.probe: torch.Tensor | int = 0
        """What a few words of the whole came to."""
        self._arrival: Arrival | None = None
        self._run = 0

    @property
    def is_coming(self) -> bool:
        """Whether the slices of all ranks are on their way."""
        return self._arrival is not None

    def comes_with(self, arrival: Arrival, run: int) -> None:
        """Its bytes are on their way."""
        self._arrival, self._run = arrival, run

    def land(self) -> torch.Tensor:
        """Returns the bytes that were on their way, without what fills up the slices."""
        arrival, self._arrival = self._arrival, None
        assert arrival is not None
        return arrival.take(self._run)[: self.num_bytes]

    def release_own(self) -> None:
        """Lets go of the slice; a gather that has begun holds it itself."""
        self.slice = self.whole = None

    def drop(self) -> None:
        """Lets go of all bytes."""
        if self._arrival is not None:
            self._arrival.drop(self._run)
        self._arrival = self.whole = self.slice = self.inner = None


@final
class _Call:
    """What is to be asked about one call of a block when it is over."""

    __slots__ = ("key", "unknown")

    def __init__(self, block: str) -> None:
        self.key = hash(block)
        self.unknown: list[tuple[int, _Cut]] = []

    def next_key(self, num_bytes: int) -> int:
        """Returns what stands for the block and the sizes of all of its pieces up to this one."""
        self.key = hash((self.key, num_bytes))
        return self.key


@final
class Shard(Place):
    """Keeps one slice for each rank; a piece that is not equal on all ranks stays whole.

    Args:
        ranks: Who shares.
        device: Where the tensors are.
        inner: Where the slices go; ``None`` if they stay on the device.
    """

    def __init__(self, ranks: Ranks, device: torch.device, inner: Place | None) -> None:
        self._ranks = ranks
        self._inner = inner
        self.label = "part" if inner is None else f"{inner.label} part"
        self._replicas = Replicas(ranks, f"{self.label} on {device.type} over ranks {ranks.members}")
        self._calls: weakref.WeakKeyDictionary[Group, _Call] = weakref.WeakKeyDictionary()

    @property
    def where(self) -> str:
        """What holds the slices."""
        return "device" if self._inner is None else self._inner.where

    def stored_bytes(self, num_bytes: int) -> int:
        """Returns the bytes of one slice."""
        return self._bytes_here(self._slice_bytes(num_bytes))

    @property
    def num_ranks(self) -> int:
        """Into how many slices a piece is cut."""
        return self._ranks.size

    def gathered_bytes(self, num_bytes: int) -> int:
        """Returns the bytes of all slices of a piece."""
        return self._slice_bytes(num_bytes) * self._ranks.size

    def put(self, data: torch.Tensor, group: Group) -> Ticket:
        """Cuts at once what is known to be equal on all ranks; the rest waits whole until the call is over."""
        ticket = _Cut(data)
        call = self._calls.setdefault(group, _Call(group.block))
        key = call.next_key(ticket.num_bytes)
        is_equal = self._replicas.known(key)
        if is_equal is None:
            call.unknown.append((key, ticket))
        else:
            self._settle(ticket, group, is_equal=is_equal)
        return ticket

    def seal(self, group: Group) -> None:
        """Asks the other ranks about the call's new sizes, then cuts what has waited."""
        call = self._calls.pop(group, None)
        unknown = [] if call is None else [(k, t, t.whole) for k, t in call.unknown if t.whole is not None]
        if unknown:
            keys, tickets, pieces = zip(*unknown, strict=True)
            equal = self._replicas.ask(keys, pieces, group)
            for ticket, is_equal in zip(tickets, equal, strict=True):
                self._settle(ticket, group, is_equal=is_equal)
        if self._inner is not None:
            self._inner.seal(group)

    def announce(self, tickets: Sequence[Ticket], group: Group) -> None:
        """Has this rank's bytes brought to the device, so that a gather finds them there."""
        beneath = [ticket.inner for ticket in _cuts(tickets) if ticket.inner is not None]
        if self._inner is not None and beneath:
            self._inner.begin(beneath, group)

    def begin(self, tickets: Sequence[Ticket], group: Group) -> None:
        """Sends for all slices of the group by one collective."""
        away = [ticket for ticket in _cuts(tickets) if ticket.whole is None and not ticket.is_coming]
        self.announce(away, group)
        cut = [ticket for ticket in away if ticket.is_cut]
        if cut:
            self._gather(cut, group)

    def take(self, ticket: Ticket, group: Group) -> torch.Tensor:
        """Returns the bytes; those that nobody has sent for are sent for now, on all ranks alike."""
        assert isinstance(ticket, _Cut)
        if ticket.whole is not None:
            return ticket.whole
        if not ticket.is_cut:
            return self._own(ticket, group)
        if not ticket.is_coming:
            self._gather([ticket], group)
        whole = ticket.land()
        self._compare(whole, ticket, group)
        return whole

    def free(self, ticket: Ticket) -> None:
        """Lets go of the slice."""
        assert isinstance(ticket, _Cut)
        if self._inner is not None and ticket.inner is not None:
            self._inner.free(ticket.inner)
        ticket.drop()

    def begin_step(self) -> None:
        """The place beneath begins a step."""
        if self._inner is not None:
            self._inner.begin_step()

    def close(self) -> None:
        """Closes the place beneath."""
        if self._inner is not None:
            self._inner.close()

    def _settle(self, ticket: _Cut, group: Group, *, is_equal: bool) -> None:
        """Keeps what is to be kept of a whole piece."""
        data = ticket.whole
        assert data is not None
        if is_equal:
            own = self._slice_of(data)
            ticket.is_cut, ticket.whole, ticket.probe = True, None, probe(data)
        else:
            own = data
            if group.traffic is not None:  # the front end has counted a slice
                more = self._bytes_here(ticket.num_bytes) - self.stored_bytes(ticket.num_bytes)
                group.traffic.bytes_at[self.where] += more
        if self._inner is not None:
            ticket.inner = self._inner.put(own, group)
            ticket.whole = None
        elif is_equal:
            ticket.slice = own

    def _slice_of(self, data: torch.Tensor) -> torch.Tensor:
        """Returns this rank's slice, in memory of its own; behind the last byte of ``data`` are zeros."""
        num_bytes = self._slice_bytes(data.numel())
        part = data[self._ranks.rank * num_bytes :][:num_bytes]
        if part.numel() == num_bytes:
            return part.clone()
        own = data.new_zeros(num_bytes)
        own[: part.numel()] = part
        return own

    def _gather(self, tickets: Sequence[_Cut], group: Group) -> None:
        arrival = self._ranks.gather([self._own(ticket, group) for ticket in tickets], group.block)
        for run, ticket in enumerate(tickets):
            ticket.comes_with(arrival, run)

    def _compare(self, whole: torch.Tensor, ticket: _Cut, group: Group) -> None:
        """Sees that the ranks still keep the same tensors: on the CPU at once, elsewhere on the device."""
        ok = probe(whole) == ticket.probe
        what = "what the ranks gathered is not what this one kept: they no longer keep equal tensors in equal order"
        if isinstance(ok, torch.Tensor):
            assert_on_device(ok, f"{group.block}: partition: {what}")
        elif not ok:
            raise StoreError(
                f"{group.block}: partition: {what} · fix: cut only over ranks that are given the same data, as those of"
                " tensor parallelism, and let all of them run the same blocks in the same order"
            )

    def _own(self, ticket: _Cut, group: Group) -> torch.Tensor:
        """Returns the bytes that this rank keeps."""
        if ticket.slice is not None:
            return ticket.slice
        assert self._inner is not None
        assert ticket.inner is not None
        return self._inner.take(ticket.inner, group)

    def _slice_bytes(self, num_bytes: int) -> int:
        return -(-num_bytes // (self._ranks.size * _ALIGN)) * _ALIGN

    def _bytes_here(self, num_bytes: int) -> int:
        return num_bytes if self._inner is None else self._inner.stored_bytes(num_bytes)


def left_whole(ticket: Ticket) -> torch.Tensor | None:
    """Returns all bytes of a piece, flat, where it has not been cut, or not yet."""
    return ticket.whole if isinstance(ticket, _Cut) else None


def _cuts(tickets: Sequence[Ticket]) -> list[_Cut]:
    return [ticket for ticket in tickets if isinstance(ticket, _Cut)]
