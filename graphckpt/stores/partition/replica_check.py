"""Checks whether the saved tensors of a block are equal on all ranks, once per block and sequence of sizes."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from typing import Any, final

import torch

from graphckpt.errors import StoreError
from graphckpt.stores.base import TensorGroup
from graphckpt.stores.partition.ranks import RankGroup

_CHUNK = 1 << 18  # words of 8 bytes per iteration, so that a checksum takes a few MiB besides the tensor
_PROBED = 256  # words compared in each call: data-parallel ranks differ in nearly all of them
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 over the golden ratio, as a signed word: multiplying by it spreads bits
_FIX = "fix: use the same policies on all ranks, and run the same blocks with the same shapes in the same order"


@final
class ReplicaCheck:
    """Remembers which saved tensors are equal on all ranks.

    Args:
        ranks: The ranks to compare.
        policy: How the tensors are stored; must be the same on all ranks.
    """

    def __init__(self, ranks: RankGroup, policy: str) -> None:
        self._ranks = ranks
        self._policy = policy
        self._known: dict[int, bool] = {}
        self._warned: set[str] = set()

    def known(self, key: int) -> bool | None:
        """Returns whether tensors of this key are equal on all ranks; ``None`` if that was not checked yet."""
        return self._known.get(key)

    def check(self, keys: Sequence[int], pieces: Sequence[torch.Tensor], group: TensorGroup) -> list[bool]:
        """Compares all ranks and returns for each piece, of flat bytes, whether it is equal on all of them.

        Raises:
            StoreError: The ranks run different blocks, sizes or policies, or one is gone or late.
        """
        if pieces[0].is_cuda and torch.cuda.is_current_stream_capturing():
            raise StoreError(
                f"{group.block}: partition: expected shapes seen before the capture, got new ones, which ranks cannot"
                " compare in it · fix: run one step with these shapes first"
            )
        checksums: list[int] = torch.stack([checksum(piece) for piece in pieces]).tolist()
        mine = {
            "block": group.block,
            "sizes": [piece.numel() for piece in pieces],
            "policy": self._policy,
            "checksums": checksums,
        }
        answers = [json.loads(text) for text in self._ranks.exchange(json.dumps(mine).encode(), group.block)]
        self._compare(answers, group.block)
        equal = [len(set(sums)) == 1 for sums in zip(*(answer["checksums"] for answer in answers), strict=True)]
        self._known.update(zip(keys, equal, strict=True))
        if not all(equal):
            self._warn(group, equal.count(False), len(equal))
        return equal

    def _compare(self, answers: Sequence[dict[str, Any]], block: str) -> None:
        first, members = answers[0], self._ranks.members
        for what, meaning in (("block", "block"), ("policy", "store"), ("sizes", "sizes in bytes")):
            for member, answer in zip(members, answers, strict=True):
                if answer[what] != first[what]:
                    raise StoreError(
                        f"{block}: partition: expected the same {meaning} on all ranks, got {first[what]!r} on rank"
                        f" {members[0]} and {answer[what]!r} on rank {member} · {_FIX}"
                    )

    def _warn(self, group: TensorGroup, num_differ: int, num_all: int) -> None:
        text = "its tensors" if num_differ == num_all else f"{num_differ} of its {num_all} tensors"
        verb = "differs" if num_differ == 1 < num_all else "differ"
        text = f"{text} {verb} between ranks: already sharded, left whole"
        group.note(f"partition: {text}")
        if group.block not in self._warned:
            self._warned.add(group.block)
            warnings.warn(f"{group.block}: partition: {text}", stacklevel=2)


def checksum(data: torch.Tensor) -> torch.Tensor:
    """Returns an ``int64`` that depends on every bit of ``data``, flat bytes, and on its position; no host sync.

    >>> one = torch.arange(32, dtype=torch.uint8)
    >>> bool(checksum(one) == checksum(one.clone())), bool(checksum(one) == checksum(one.flip(0)))
    (True, False)
    """
    num_words = data.numel() // 8
    words, tail = data[: 8 * num_words].view(torch.int64), data[8 * num_words :].to(torch.int64)
    total = torch.full((), data.numel(), dtype=torch.int64, device=data.device)
    keys = torch.arange(1, min(num_words, _CHUNK) + 8, device=data.device).mul_(_ODD)
    for chunk in (*words.split(_CHUNK), tail):
        mixed = chunk + keys[: chunk.numel()]
        for shift in (29, 32):  # multiplying carries bits up, shifting carries them down: all bits depend on all
            mixed *= _ODD
            mixed ^= mixed >> shift
        total = total * _ODD + mixed.sum()
    return total


def probe(data: torch.Tensor) -> torch.Tensor | int:
    """Returns the sum of some words of ``data``, flat bytes, spread over it: an int on the CPU, else a scalar tensor.

    >>> one = torch.arange(64, dtype=torch.uint8)
    >>> probe(one) == probe(one.clone()), probe(one) == probe(one + 1)
    (True, False)
    """
    num_words = data.numel() // 8
    words = data[: 8 * num_words].view(torch.int64)[:: num_words // _PROBED + 1] if num_words else data.to(torch.int64)
    total = words.sum()
    return total if data.device.type != "cpu" else int(total)
