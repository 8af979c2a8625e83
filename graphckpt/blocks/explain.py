"""Records a step of a model by hooks, and makes the table of `explain()` from the record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from graphckpt._compat import is_checkpoint_wrapper, is_transformed
from graphckpt._compat_compiler import has_compiled_call
from graphckpt._compat_memory import gradient_buckets
from graphckpt.blocks.compiled import share_of
from graphckpt.blocks.forward import BlockForward, WatchedForward, checkpoints_itself, policy_of
from graphckpt.blocks.hooks import add_hook, add_optimizer_hook, add_pre_hook
from graphckpt.blocks.resolve import ResolvedPolicies
from graphckpt.blocks.select import has_forward, layers
from graphckpt.engine.sampling import without_value_checks
from graphckpt.errors import GraphError, warn_once
from graphckpt.ledger.explanation import Explanation
from graphckpt.ledger.live_memory import StorageLog
from graphckpt.ledger.record import Row
from graphckpt.ledger.recorder import REST, Recorder
from graphckpt.ledger.table import print_table
from graphckpt.rules.basic import Full, Joined, Keep
from graphckpt.rules.segments import Segments
from graphckpt.rules.selective import Selective
from graphckpt.rules.tiles import Tiles
from graphckpt.stores.base import Traffic
from graphckpt.tree import tensors_in
from graphckpt.undo import Undo, enter, put_back, scope
from graphckpt.units import format_bytes

# Note [Three ways to record a step]
#
#     watch_next_forward   after `apply`: hooks around modules and the counts of blocks say what the first forward with
#                          gradients saves. It ends with the next forward: until then its backward may come, and
#                          recompute. No dispatch mode, so that the step is about as fast as later ones.
#     measure              a dispatch mode sees each storage: also peaks, the plot, and what each block would keep.
#                          Times would be those of the mode.
#     time                 the same hooks without the mode: seconds of forwards, recomputations and copies.
#
# `explain` shows bytes of the last record of the first two, and times of the last one.

_IN_GRAPH = "torch.compile has made it a part of a larger graph, and what it saves there is not counted"
_WITHIN = (
    "PyTorch's checkpoint within it recomputes its layers as well, so that this policy saves little more · fix: use "
    "one of the two"
)
_REPLACED = (
    "it was replaced after its policy was set, and the new module has none · fix: set policies after the replacement, "
    "or apply(..., replace=True)"
)
_IN_TRANSFORM = "torch.func or forward-mode AD was around the step: nothing was measured, since no policy acts in it"


@final
class StepRecorder:
    def __init__(self, title: str, roots: list[tuple[str, nn.Module]], policies: ResolvedPolicies) -> None:
        self.title = title
        self._roots = roots
        self._wrappers = policies.wrappers
        self._policies = policies
        self._bytes: Recorder | None = None
        self._times: Recorder | None = None
        self._record: Undo = []  # ends the one in progress, without measuring
        self._is_waiting = False  # for the forward to record
        self._recorded: list[BlockForward] = []  # the wrappers whose modules were in the model then
        self._is_measuring = False
        self.is_removed = False  # whether the policies are
        self._has_transforms = False  # whether a call within a transform was left out
        self.advice: Callable[[Sequence[str]], str] = _advice
        """Says how to make blocks of these names keep everything, in the words in which policies were set."""

    @scope
    def measure(self, undo: Undo, inputs: Iterable[torch.Tensor] = ()) -> Iterator[None]:
        if self._is_measuring:  # within the step that is being measured
            yield
            return
        self.close()
        inputs = list(inputs)
        live = StorageLog(counts_fake=self._is_meta())
        recorder = Recorder((*self._state(), *inputs), live)
        self._log_state(live, inputs)
        new: list[torch.optim.Optimizer] = []  # whose states are created by this step, and so only labelled after it

        def see_optimizer(optimizer: torch.optim.Optimizer, *_: object) -> None:
            state = _state_of(optimizer)
            recorder.optimizer_steps(state, (w for group in optimizer.param_groups for w in group["params"]))
            if not state:
                new.append(optimizer)

        def see_call(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._has_transforms |= is_transformed()
            recorder.ignore(tensors_in((args, kwargs)))  # the caller keeps them alive in any case

        def see_end(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _output: object) -> None:
            live.use(tensors_in((args, kwargs)))

        enter(undo, without_value_checks())
        undo.append((setattr, (self, "_is_measuring", False)))
        self._is_measuring = True
        add_optimizer_hook(undo, see_optimizer)
        enter(undo, self._rows_for_modules(recorder))
        enter(undo, recorder.watching())
        name, root = self._roots[0]
        if not name:  # not of a Graph, which passes its inputs
            add_pre_hook(undo, root, see_call, with_kwargs=True)
            add_hook(undo, root, see_end, with_kwargs=True)
        yield
        put_back(undo)
        live.label(self._gradients(), "gradients")
        for optimizer in new:
            live.label(_state_of(optimizer), "optimizer states")
        recorder.has_optimizer_states = not any(map(_state_of, new))
        self._bytes = recorder

    @scope
    def time(self, undo: Undo, *, checks_values: bool) -> Iterator[Recorder]:
        recorder = Recorder()
        if not checks_values:
            enter(undo, without_value_checks())
        enter(undo, self._rows_for_modules(recorder))
        yield recorder
        put_back(undo)
        self._times = recorder

    def watch_next_forward(self) -> None:
        """Records the next forward of the model and what its backward recomputes, at the cost of a few hooks."""
        self._is_waiting = True
        self._record.append((WatchedForward.watch(self._roots[0][1], self._around_forward), ()))

    @contextmanager
    def _around_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        self._has_transforms |= is_transformed()
        if not self._is_waiting:  # a record ends with the next forward: until then its backward may come
            self.close()
            yield
            return
        if not torch.is_grad_enabled() or is_transformed():
            yield
            return
        self._is_waiting = False
        recorder = self._bytes = Recorder([*self._state(), *tensors_in((args, kwargs))])
        end_forward = enter(self._record, self._rows_for_modules(recorder))
        try:
            recorder.begin()
            yield
        finally:
            recorder.end()
            end_forward()

    @scope
    def _rows_for_modules(self, undo: Undo, recorder: Recorder) -> Iterator[Callable[[], None]]:
        """Has all modules with a row tell the recorder of their calls; yields a function for the end of the forward.

        It removes the hooks that backward has no use for: a program may want its modules without any behind its step.
        """
        replaced = self._replaced()
        wrappers = self._recorded = [wrapper for wrapper in self._wrappers if wrapper.name not in replaced]
        for name, what in replaced.items():
            warn_once(name or self.title, what)
        plain = self._plain_modules()
        hooks: list[tuple[str, Callable[[], None]]] = []
        checkpointing = recorder.own_checkpointing = {
            name for name, module in plain if any(map(checkpoints_itself, module.modules()))
        }
        recorder.weightless = {name for name, module in plain if next(module.parameters(), None) is None}

        def end_forward() -> None:
            for name, remove in hooks:
                if name not in checkpointing:
                    remove()

        def end_recording() -> None:
            for wrapper in wrappers:
                if wrapper.module is not None:  # or `context` would be created for a module that was freed
                    wrapper.context.recorder = None

        undo.append((end_recording, ()))
        for wrapper in wrappers:
            wrapper.context.recorder = recorder
        while plain:  # emptied: what waits here for the end of the step must not keep the model alive
            name, module = plain.pop()
            # Begin first and end in any case: other hooks may run ops, or raise, and calls that nest must pair up.
            begin = partial(_ignoring_arguments, recorder.enter_plain, name)
            end = partial(_ignoring_arguments, recorder.leave_plain, name)
            hooks.append((name, add_pre_hook(undo, module, begin, prepend=True)))
            hooks.append((name, add_hook(undo, module, end, always_call=True)))
        module = None  # type: ignore[assignment]
        yield end_forward

    def _replaced(self) -> dict[str, str]:
        """Says of the blocks whose modules are no longer in the model what has become of them."""
        present = {
            f"{root}.{name}".strip("."): module
            for root, top in self._roots
            for name, module in top.named_modules(remove_duplicate=False)
        }
        alive = {id(module) for module in present.values()}
        replaced: dict[str, str] = {}
        for wrapper in self._wrappers:
            if wrapper.module is not None and id(wrapper.module) in alive:
                continue
            other = present.get(wrapper.name)
            if other is None:
                replaced[wrapper.name] = "it was removed from the model after its policy was set"
            elif policy_of(other) is None:
                replaced[wrapper.name] = _REPLACED
            else:
                replaced[wrapper.name] = "it was replaced by a module that has a policy"
        return replaced

    def close(self) -> None:
        """Ends a record in progress, including one that an interrupt has left behind."""
        if self._bytes is not None:
            self._bytes.end()
        self._is_waiting = False
        put_back(self._record)

    def explain(self, plot: str | None, *, show: bool, capture: str = "") -> Explanation:
        recorder = self._bytes
        if recorder is None or not recorder.runs:
            if any(map(self._is_in_graph, self._wrappers)):
                fix = "run one step of the model itself, or set policies on the modules that are compiled"
                raise GraphError(f"{self.title}: {_IN_GRAPH} · fix: {fix}")
            if self._is_measuring:
                raise GraphError(f"{self.title}: the measurement has not ended · fix: call explain() after the `with`")
            if self._has_transforms:
                raise GraphError(f"{self.title}: {_IN_TRANSFORM} · fix: run one step without it")
            if self.is_removed:
                fix = "set policies again, and run one step before remove()"
                raise GraphError(f"{self.title}: no step has run under the policies, which were removed · fix: {fix}")
            if recorder is not None:
                what = "the measured step has called no block of the model"
                raise GraphError(f"{self.title}: {what} · fix: run one step inside of `with ....measure():`")
            raise GraphError(f"{self.title}: no step has been measured yet · fix: run one step")
        elsewhere = {w.name for w in self._recorded if w.module is not None and self._is_elsewhere(w.module)}
        wrappers = [w for w in self._recorded if w.name not in elsewhere]
        empty = {
            name for name in recorder.weightless if not (recorder.bytes_before(name) or recorder.bytes_after(name))
        }
        omitted = elsewhere | (empty - {*self._policies.selected})
        rules = dict.fromkeys(w.rule for w in wrappers if isinstance(w.rule, Selective) and w.rule.label)
        ops = {
            rule.describe(): ", ".join(map(str, rule.save)) for rule in rules if isinstance(rule.save, (list, tuple))
        }
        live, unpredictable = recorder.live, _unpredictable(wrappers, recorder)
        levels = () if live is None or unpredictable else tuple(live.levels_if_kept(lambda block: True))
        explanation = Explanation(
            title=self.title,
            rows=tuple(row for row in self._rows(wrappers, recorder) if row.block not in omitted),
            bytes_before=recorder.plain_total.largest,
            bytes_after=recorder.totals["device"].largest,
            bytes_host=recorder.totals["host"].largest,
            bytes_disk=recorder.totals["disk"].largest,
            peak_bytes=live.peak_bytes if live else None,
            plain_peak_bytes=max(levels) if levels else None,
            unpredictable=unpredictable if live else "",
            static_bytes=live.static_bytes if live else 0,
            has_optimizer_states=recorder.has_optimizer_states,
            timeline=tuple(live.timeline) if live else (),
            plain_levels=levels,
            tensors=tuple(live.tensors) if live else (),
            legend=tuple((name, f"keeps the results of {text}") for name, text in sorted(ops.items())),
            warnings=tuple(self._warnings(wrappers, recorder, max(levels, default=None))),
            capture=capture,
            sketch_bytes=sum(w.context.sketch_bytes for w in self._wrappers if w.module is not None),
        )
        if plot is not None:
            explanation.plot(plot)
        if show:
            print_table(explanation)
        return explanation

    def _rows(self, wrappers: Sequence[BlockForward], recorder: Recorder) -> Iterator[Row]:
        idle, times, replaced = self._policies.idle, self._times, self._replaced()
        wrapped = {wrapper.name: wrapper for wrapper in wrappers}
        names = dict.fromkeys((*recorder.order, *wrapped))
        if recorder.bytes_before(REST) or recorder.bytes_after(REST):
            names[REST] = None
        for name in names:
            wrapper = wrapped.get(name)
            notes = list(wrapper.context.notes) if wrapper is not None else []
            if wrapper is not None and _is_checkpointed_within(wrapper, recorder):
                notes.append(_WITHIN)
            if name in recorder.own_checkpointing:
                notes.append("the model's own gradient checkpointing recomputes it")
            notes = [note for note in (idle.get(name), replaced.get(name)) if note] + notes
            more_bytes = recorder.bytes_after(name) - recorder.bytes_before(name)
            if wrapper is None and more_bytes > 0:
                notes.append(
                    f"it keeps {format_bytes(more_bytes)} more than before, such as its input: without policies they "
                    "are in the row of a block that is now recomputed"
                )
            stored = (recorder.traffic.get(name) or Traffic()).bytes_at
            timed = (times or recorder).traffic.get(name) or Traffic()
            yield Row(
                block=name or self.title,
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
                recompute_seconds=times.recompute_seconds[name] if times and name in times.recompute_seconds else None,
                copy_seconds=timed.copy_seconds or None,
                wait_seconds=timed.wait_seconds if timed.copy_seconds else None,
                note=" · ".join(notes),
            )

    def _warnings(self, wrappers: Sequence[BlockForward], recorder: Recorder, plain_peak: int | None) -> Iterator[str]:
        flagged = [w for w in wrappers if not isinstance(w.rule, Keep) or w.placement is not None]
        idle = self._policies.idle
        faults: dict[str, list[str]] = {}  # with the blocks that have it, which are one warning
        for wrapper in flagged:
            name = wrapper.name
            is_in_graph = self._is_in_graph(wrapper)
            if not recorder.runs[name] and (is_in_graph or name not in idle):
                fault = _IN_GRAPH if is_in_graph else "never ran with gradients, so the policy had no effect"
                faults.setdefault(fault, []).append(name or self.title)
        for name, note in (*idle.items(), *((w.name, note) for w in flagged for note in w.context.notes)):
            if "has no effect" in note:
                faults.setdefault(note, []).append(name or self.title)
        for name, fault in self._replaced().items():
            faults.setdefault(fault, []).append(name or self.title)
        for fault, names in faults.items():
            yield f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {fault}"
        ran = [w for w in flagged if recorder.reruns[w.name]]
        tops = {id(root) for _, root in self._roots}
        is_as_high = recorder.live is None or plain_peak is None or plain_peak <= 1.02 * recorder.live.peak_bytes
        for wrapper in ran:
            if id(wrapper.module) in tops and not isinstance(wrapper.rule, (Segments, Tiles)) and is_as_high:
                yield (
                    f"{wrapper.name or self.title}: it is one block as a whole, so all of it is alive again when it "
                    "is recomputed, and the peak hardly falls · fix: set the policy on its layers"
                )
        if not any(isinstance(w.rule, Joined) for w in wrappers) and tops.isdisjoint(id(w.module) for w in ran):
            yield from _last_blocks(wrappers, recorder, ran, self.advice)
        yield from _large_blocks(ran, recorder)

    def _state(self) -> list[torch.Tensor]:
        return [t for _, root in self._roots for t in (*root.parameters(), *root.buffers()) if not is_lazy(t)]

    def _log_state(self, live: StorageLog, inputs: Sequence[torch.Tensor]) -> None:
        """Counts what exists before the step. Nothing may refer to it afterwards: the step replaces some of it."""
        weights = self._state()
        buckets = gradient_buckets(weights)
        live.track([*weights, *inputs, *self._gradients(inputs), *buckets])
        live.label((*self._gradients(inputs), *buckets), "gradients")
        live.label(inputs, "inputs")
        live.label(weights, "weights")

    def _gradients(self, inputs: Iterable[torch.Tensor] = ()) -> Iterator[torch.Tensor | None]:
        return (tensor.grad for tensor in (*self._state(), *inputs) if tensor.is_leaf)

    def _plain_modules(self) -> list[tuple[str, nn.Module]]:
        """Returns the modules without a wrapper that get a row: selected blocks, and the modules next to them.

        If no block is selected, it is as if the layers of the model were.
        """
        wrapped = {w.name for w in self._recorded} | {id(w.module) for w in self._recorded}
        selected = {*self._policies.selected, *(w.name for w in self._wrappers)} or {
            f"{name}.{layer}" if name else layer for name, root in self._roots for layer in layers(root)
        }
        rows: list[tuple[str, nn.Module]] = []
        for name, root in self._roots:
            _rows_below(name, root, selected, rows)
        rows = [(name, module) for name, module in rows if wrapped.isdisjoint((name, id(module)))]
        rows = [(name, module) for name, module in rows if not isinstance(module, torch.jit.ScriptModule)]  # no hooks
        return [(name, module) for name, module in rows if not self._is_elsewhere(module)]

    def _is_in_graph(self, wrapper: BlockForward) -> bool:
        """Whether ``torch.compile`` runs the block in the graph of a larger module.

        Equal modules share compiled code, which is traced, and so seen by the wrapper, on one of them alone.
        """
        compiled = [module for _, root in self._roots for module in root.modules() if has_compiled_call(module)]
        parts = (
            part for module in compiled for part in module.modules() if part._compiled_call_impl or part is not module
        )
        return wrapper.is_in_graph or any(part is wrapper.module for part in parts)

    def _is_elsewhere(self, module: nn.Module) -> bool:
        """Whether a module is one of another pipeline stage: on the meta device, unlike the rest of the model."""
        weights = list(module.parameters())
        return bool(weights) and all(weight.is_meta for weight in weights) and not self._is_meta()

    def _is_meta(self) -> bool:
        return all(tensor.is_meta for tensor in self._state())


def _rows_below(name: str, module: nn.Module, selected: set[str], rows: list[tuple[str, nn.Module]]) -> None:
    is_selected = name in selected
    is_split = any((f"{name}.{key}" if name else key) in selected for key, _ in module.named_modules() if key)
    is_split |= not has_forward(module) and not is_selected
    if is_selected or not is_split:
        rows.append((name, module))
    if is_split:
        inner: list[tuple[str, nn.Module]] = []
        for key, child in module.named_children():
            path = f"{name}.{key}" if name else key
            _rows_below(path, child, selected, inner)
        rows += [row for row in inner if not is_selected or row[0] in selected]


def _state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]


def _is_checkpointed_within(wrapper: BlockForward, recorder: Recorder) -> bool:
    """Whether PyTorch's checkpoint recomputes modules of a recomputed block. ``measure()`` sees its calls."""
    if isinstance(wrapper.rule, Keep) or wrapper.module is None:
        return False
    called = set() if recorder.live is None else recorder.live.checkpointed
    return wrapper.name in called or any(map(is_checkpoint_wrapper, wrapper.module.modules()))


def _ignoring_arguments(call: Callable[[str], None], name: str, *_: object) -> None:
    call(name)


def _rule(wrapper: BlockForward | None) -> str:
    if wrapper is None:
        return Keep.name
    rule = "part" if wrapper.only_compiles else wrapper.rule.describe()
    if wrapper.compile_options is None:
        return rule
    return f"{rule}{share_of(wrapper.compile_options)}, compiled"


def _advice(names: Sequence[str]) -> str:
    return f"set activation_checkpointing = False on {', '.join(names)}"


def _last_blocks(
    wrappers: Sequence[BlockForward],
    recorder: Recorder,
    ran: Sequence[BlockForward],
    advice: Callable[[Sequence[str]], str],
) -> Iterator[str]:
    """Advises not to recompute the last blocks if the peak would not rise; only a prediction can tell.

    While the logits and the loss are alive, so is what the last block keeps. Recomputing it moves these bytes behind
    that moment, and often lowers the peak.
    """
    live = recorder.live
    if live is None or len(ran) < 2 or _unpredictable(wrappers, recorder):
        return
    order = {name: number for number, name in enumerate(recorder.order)}
    names: list[str] = []
    least_bytes = 0
    for wrapper in sorted(ran, key=lambda w: order.get(w.name, -1), reverse=True):
        others = [f"{w.name}." for w in wrappers if w is not wrapper]
        rules = Full if names else (Full, Selective)  # of several selective blocks the prediction is not exact
        path = f"{wrapper.name}."
        is_nested = any(path.startswith(other) or other.startswith(path) or "." in (path, other) for other in others)
        if not isinstance(wrapper.rule, rules) or is_nested:
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
            f"{which}: recomputing {'it' if len(names) == 1 else 'them'} does not lower the peak "
            f"({format_bytes(least_bytes)} predicted if kept) · "
            f"fix: {advice(names)}"
        )


def _large_blocks(ran: Sequence[BlockForward], recorder: Recorder) -> Iterator[str]:
    """Advises smaller blocks if the peak is reached in the backward of one that is a container of layers."""
    live = recorder.live
    if live is None or not live.timeline:
        return
    peak = max(live.timeline, key=lambda event: event.live_bytes)
    if peak.phase not in ("recompute", "backward"):
        return
    patterns: list[str] = []
    for wrapper in ran:
        if wrapper.module is not None and wrapper.name and isinstance(wrapper.rule, Full):
            inner = _inner_layers(wrapper.name, wrapper.module)
            if inner:
                patterns += inner
            elif wrapper.name == peak.block:
                return
    at_peak = [pattern for pattern in patterns if pattern.startswith(f"{peak.block}.")]
    if at_peak:
        yield (
            f"{peak.block}: all of its layers are recomputed at once, and the peak is reached there · fix: select the "
            f"layers as blocks: {', '.join(map(repr, patterns))}"
        )


def _inner_layers(name: str, module: nn.Module) -> list[str]:
    """Returns patterns for the layers that make up most of a module; none if it is a layer itself."""
    inner = layers(module)
    parts = [module.get_submodule(layer) for layer in inner]
    num_weights = sum(weight.numel() for part in parts for weight in part.parameters())
    is_most = 2 * num_weights > sum(weight.numel() for weight in module.parameters())
    if len(inner) < 2 or not is_most or any(next(part.children(), None) is None for part in parts):
        return []  # of linear layers, which recomputed one by one keep as much
    return list(dict.fromkeys(f"{name}.{layer.rpartition('.')[0]}".rstrip(".") + ".*" for layer in inner))


def _unpredictable(wrappers: Sequence[BlockForward], recorder: Recorder) -> str:
    """Says why the log of storages does not tell what the step would keep under other policies; empty if it does."""
    if recorder.own_checkpointing:
        return "the model's own gradient checkpointing recomputes layers"
    if any(traffic.has_moved for traffic in recorder.traffic.values()):
        return "stores move saved tensors; to compare, measure a step under apply(model, False)"
    if any(w.compile_options is not None for w in wrappers):
        return "compiled blocks hide what they allocate"
    return "tiles run a block in slices" if any(isinstance(w.rule, Tiles) for w in wrappers) else ""
