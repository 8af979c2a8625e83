"""Exchanges small messages between ranks through the group's key-value store, with a timeout."""

from __future__ import annotations

import time
from typing import Any, final

_LONGEST_SLEEP = 0.01  # seconds between two checks for the other ranks' messages


@final
class RendezvousTimeout(Exception):  # noqa: N818  # torch.distributed's word; the caller raises the error for users
    """Some ranks did not join in time."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(f"rank {', '.join(map(str, ranks))} did not join")
        self.ranks = ranks
        """Global ranks."""


def exchange(process_group: Any, members: list[int], message: bytes, *, topic: str, seconds: float) -> list[bytes]:
    """Returns the messages of all ranks, in order of rank. Blocks the host, but no stream.

    Unlike a collective, ranks at different points of the program do not deadlock, messages may differ in length, and
    the ranks that did not join can be named.

    Args:
        process_group: The group; this rank is a member.
        members: Global ranks of the group.
        message: This rank's message.
        topic: The exchanges of a topic are counted: each rank's first one belongs together, and so on.
        seconds: How long to wait for the others.

    Raises:
        RendezvousTimeout: Some ranks did not join in time.
        RuntimeError: The key-value store is gone.
    """
    store = process_group.get_group_store()
    own = process_group.rank()
    number = store.add(f"{topic}/{own}", 1)
    keys = [f"{topic}/{number}/{rank}" for rank in range(len(members))]
    store.set(keys[own], message)
    deadline = time.monotonic() + seconds
    pause = _LONGEST_SLEEP / 100
    while not store.check(keys):
        if time.monotonic() > deadline:
            raise RendezvousTimeout(
                [member for member, key in zip(members, keys, strict=True) if not store.check([key])]
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_SLEEP)
    messages: list[bytes] = store.multi_get(keys)
    if number > 1:  # all ranks that are here have read the previous messages
        store.delete_key(f"{topic}/{number - 1}/{own}")
    return messages
