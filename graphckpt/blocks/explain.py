"""Makes the table that `explain()` shows out of what was seen of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn

from graphckpt.blocks.compiled import share_of
from graphckpt.ledger.explanation import Explanation
from graphckpt.ledger.record import Row
from graphckpt.ledger.recorder import REST, Recorder
from graphckpt.rules.full import Full
from graphckpt.rules.joined import Joined
from graphckpt.rules.keep import Keep
from graphckpt.rules.segments import Segments
from graphckpt.rules.selective import Selective
from graphckpt.rules.tiles import Tiles
from graphckpt.stores.base import Traffic
from graphckpt.units import format_bytes

if TYPE_CHECKING:
    from graphckpt.blocks.forward import BlockForward
    from graphckpt.blocks.resolve import ResolvedPolicies

IN_GRAPH = "torch.compile has made it a part of a larger graph, and what it saves there is not counted"


def explain_step(
    title: str,
    roots: Sequence[tuple[str, nn.Module]],
    policies: ResolvedPolicies,
    recorder: Recorder,
    times: Recorder | None,
) -> Explanation:
    """Returns a row for each block, the totals, and what to know about them.

    Args:
        title: Name of the model or graph.
        roots: The modules that were watched, with their names.
        policies: Those of the blocks.
        recorder: Has seen what a step keeps, and its live bytes if it was watched op by op.
        times: Has seen how long the blocks of a step took, if one was watched for that.
    """
    elsewhere = {w.name for w in policies.wrappers if w.module is not None and is_elsewhere(w.module)}
    wrappers = [w for w in policies.wrappers if w.name not in elsewhere]
    idle = policies.idle
    empty = {name for name in recorder.weightless if not (recorder.bytes_before(name) or recorder.bytes_after(name))}
    omitted = elsewhere | (empty - {*policies.selected})
    rows = [row for row in _rows(title, wrappers, idle, recorder, times) if row.block not in omitted]
    live, levels = recorder.live, _plain_levels(wrappers, recorder)
    return Explanation(
        title=title,
        rows=tuple(rows),
        bytes_before=recorder.plain_total.largest,
        bytes_after=recorder.totals["device"].largest,
        bytes_host=recorder.totals["host"].largest,
        bytes_disk=recorder.totals["disk"].largest,
        peak_bytes=live.peak_bytes if live else None,
        plain_peak_bytes=max(levels) if levels else None,
        static_bytes=live.static_bytes if live else 0,
        has_optimizer_states=recorder.has_optimizer_states,
        timeline=tuple(live.timeline) if live else (),
        plain_levels=levels,
        tensors=tuple(live.tensors) if live else (),
        legend=_legend(wrappers),
        warnings=tuple(_warnings(title, roots, wrappers, idle, recorder, max(levels, default=None))),
    )


def _rows(
    title: str, wrappers: Sequence[BlockForward], idle: Mapping[str, str], recorder: Recorder, times: Recorder | None
) -> Iterator[Row]:
    wrapped = {wrapper.name: wrapper for wrapper in wrappers}
    names = dict.fromkeys((*recorder.order, *wrapped))
    if recorder.bytes_before(REST) or recorder.bytes_after(REST):
        names[REST] = None
    for name in names:
        wrapper = wrapped.get(name)
        notes = list(wrapper.context.notes) if wrapper is not None else []
        if name in recorder.own_checkpointing:
            notes.append("the model's own gradient checkpointing recomputes it")
        if name in idle:
            notes.insert(0, idle[name])
        if wrapper is None and recorder.bytes_after(name) > recorder.bytes_before(name):
            notes.append("it keeps tensors that a recomputed block keeps without policies")
        stored = (recorder.traffic.get(name) or Traffic()).bytes_at
        timed = (times or recorder).traffic.get(name) or Traffic()
        yield Row(
            block=name or title,
            rule="own checkpointing" if name in recorder.own_checkpointing else _rule(wrapper),
            place=wrapper.context.store.label if wrapper is not None else "device",
            bytes_before=recorder.bytes_before(name),
            bytes_after=recorder.bytes_after(name),
            bytes_host=stored["host"],
            bytes_disk=stored["disk"],
            runs=recorder.runs[name],
            reruns=recorder.reruns[name],
            is_own=name in recorder.own_checkpointing,
            forward_seconds=times.seconds[name] if times is not None and name in times.seconds else None,
            recompute_seconds=times.again_seconds[name] if times and name in times.again_seconds else None,
            copy_seconds=timed.copy_seconds or None,
            wait_seconds=timed.wait_seconds if timed.copy_seconds else None,
            note=" · ".join(notes),
        )


def is_elsewhere(module: nn.Module) -> bool:
    """Returns whether a module belongs to another pipeline stage: all its weights are on the meta device."""
    weights = list(module.parameters())
    return bool(weights) and all(weight.is_meta for weight in weights)


def _legend(wrappers: Sequence[BlockForward]) -> tuple[tuple[str, str], ...]:
    """Returns the ops that levels of ``selective`` keep."""
    rules = dict.fromkeys(w.rule for w in wrappers if isinstance(w.rule, Selective) and w.rule.label)
    ops = {rule.describe(): ", ".join(map(str, rule.save)) for rule in rules if isinstance(rule.save, (list, tuple))}
    return tuple((name, f"keeps the results of {text}") for name, text in sorted(ops.items()))


def _rule(wrapper: BlockForward | None) -> str:
    if wrapper is None:
        return Keep.name
    rule = "part" if wrapper.is_part else wrapper.rule.describe()
    if wrapper.compile_options is None:
        return rule
    return f"{rule}{share_of(wrapper.compile_options)}, compiled"


def _warnings(
    title: str,
    roots: Sequence[tuple[str, nn.Module]],
    wrappers: Sequence[BlockForward],
    idle: Mapping[str, str],
    recorder: Recorder,
    plain_peak: int | None,
) -> Iterator[str]:
    flagged = [w for w in wrappers if not isinstance(w.rule, Keep) or w.placement is not None]
    for wrapper in flagged:
        if not recorder.runs[wrapper.name] and wrapper.is_in_graph:
            yield f"{wrapper.name or title}: {IN_GRAPH}"
        elif not recorder.runs[wrapper.name] and wrapper.name not in idle:
            yield f"{wrapper.name or title}: it never ran with gradients, so its flag did nothing"
    yield from _useless_flags(title, flagged, idle)
    ran = [w for w in flagged if recorder.reruns[w.name]]
    tops = {id(root) for _, root in roots}
    is_as_high = recorder.live is None or plain_peak is None or plain_peak <= 1.02 * recorder.live.peak_bytes
    for wrapper in ran:
        if id(wrapper.module) in tops and not isinstance(wrapper.rule, (Segments, Tiles)) and is_as_high:
            yield (
                f"{wrapper.name or title}: it is one block as a whole, so all of it is alive again when it "
                "is recomputed, and the peak hardly falls · fix: set the flag on its layers"
            )
    if not any(isinstance(w.rule, Joined) for w in wrappers) and tops.isdisjoint(id(w.module) for w in ran):
        yield from _last_blocks(wrappers, recorder, ran)


def _useless_flags(title: str, wrappers: Sequence[BlockForward], idle: Mapping[str, str]) -> Iterator[str]:
    """Yields why fields have no effect, once for all blocks with the same reason."""
    blocks: dict[str, list[str]] = {}
    notes = [(w.name, note) for w in wrappers for note in w.context.notes]
    for name, note in (*idle.items(), *notes):
        if "does nothing" in note:
            blocks.setdefault(note, []).append(name or title)
    for note, names in blocks.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{names[0]}{more}: {note}"


def _last_blocks(wrappers: Sequence[BlockForward], recorder: Recorder, ran: Sequence[BlockForward]) -> Iterator[str]:
    """Advises not to recompute the last blocks if the peak would not rise; only a prediction can tell.

    While the logits and the loss are alive, so is what the last block keeps. Recomputing it moves these bytes behind
    that moment, and often lowers the peak.
    """
    live = recorder.live
    if live is None or len(ran) < 2 or not _can_predict(wrappers):
        return
    order = {name: number for number, name in enumerate(recorder.order)}
    names: list[str] = []
    least_bytes = 0
    for wrapper in sorted(ran, key=lambda w: order.get(w.name, -1), reverse=True):
        around = (w.name for w in wrappers if w is not wrapper)
        rules = Full if names else (Full, Selective)  # of several selective blocks the prediction is not exact
        if not isinstance(wrapper.rule, rules) or any(_overlap(wrapper.name, name) for name in around):
            break
        trial = {wrapper.name, *names}
        peak_bytes = max(live.levels_if_kept(lambda block, trial=trial: block in trial), default=0)  # type: ignore[misc]
        if peak_bytes > live.peak_bytes:
            break
        names.insert(0, wrapper.name)
        least_bytes = peak_bytes
    if names:
        which = ", ".join(names)
        yield (
            f"{which}: {'its' if len(names) == 1 else 'their'} recomputation takes nothing off the peak, which would "
            f"be {format_bytes(least_bytes)} (predicted) without it · "
            f"fix: set activation_checkpointing = False on {which}"
        )


def _plain_levels(wrappers: Sequence[BlockForward], recorder: Recorder) -> tuple[int, ...]:
    """Returns the predicted live bytes of the step without policies; empty if they cannot be predicted."""
    if recorder.live is None or recorder.own_checkpointing or not _can_predict(wrappers):
        return ()
    return tuple(recorder.live.levels_if_kept(lambda block: True))


def _can_predict(wrappers: Sequence[BlockForward]) -> bool:
    """Whether the log of storages tells what the step would keep under other policies.

    It does not if stores move tensors, if a loss is computed in slices, or if compiled code hides what it allocates.
    """
    return all(
        not isinstance(w.rule, Tiles) and w.compile_options is None and (w.placement is None or w.placement.is_plain)
        for w in wrappers
    )


def _overlap(one: str, other: str) -> bool:
    return one.startswith(f"{other}.") or other.startswith(f"{one}.") or "" in (one, other)
