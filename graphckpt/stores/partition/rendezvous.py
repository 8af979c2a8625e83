"""Words exchanged between the ranks of a group, through its key-value store, in bounded time."""

from __future__ import annotations

import time
from typing import Any, final

_LONGEST_SLEEP = 0.01  # seconds between two looks for the other ranks' words


@final
class Absent(Exception):  # noqa: N818  # no error yet: who meets says what it means
    """Some ranks have not come in time."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(f"rank {', '.join(map(str, ranks))} has not come")
        self.ranks = ranks
        """As the whole job counts them."""


def meet(process_group: Any, members: list[int], message: bytes, *, topic: str, seconds: float) -> list[bytes]:
    """Returns the messages of all ranks, in order of rank. Holds up the host, but no stream.

    In the store ranks that have come to different points meet as well, messages may differ in length, and one that
    never comes can be named.

    Args:
        process_group: Of which this rank is a member.
        members: Its ranks, as the whole job counts them.
        message: Of this rank.
        topic: Meetings of one topic are counted: the first one of each rank is one meeting, and so on.
        seconds: How long to wait for the others.

    Raises:
        Absent: Some have not come in time.
        RuntimeError: The store is gone.
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
            here = zip(members, keys, strict=True)
            raise Absent([member for member, key in here if not store.check([key])])
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_SLEEP)
    messages: list[bytes] = store.multi_get(keys)
    if number > 1:  # who is here has read the messages before these
        store.delete_key(f"{topic}/{number - 1}/{own}")
    return messages
