"""Runs one call of a Graph: installs policies, runs `build` and the update, and removes policies."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, final
from weakref import ref

import torch
from torch import nn

from graphckpt.blocks.explain import StepRecorder
from graphckpt.blocks.forward import BlockForward, disable_checkpointing
from graphckpt.blocks.proxy import BlockTree
from graphckpt.blocks.resolve import ResolvedPolicies, resolve_policies
from graphckpt.errors import GraphError, warn_once
from graphckpt.graph.capture import backend_for
from graphckpt.graph.captured_step import CapturedStep
from graphckpt.graph.config import GraphConfig
from graphckpt.graph.text import DebugLog, InputCheck
from graphckpt.graph.update import ScaledBackward, Update, preserve_grads
from graphckpt.training_state import ModuleTree
from graphckpt.tree import build_value, flatten_call, flatten_value, inner_tensors, tensors_in
from graphckpt.undo import Undo, enter, scope

_WATCHED_OPS, _WATCHED_TIMES = 2, 3  # calls 1 and 2 are watched op by op (2 is the first like all others), 3 for time

_NO_SCALER = (
    "float16 autocast without a gradient scaler, so small gradients become zero · "
    "fix: set_grad_scaler(torch.amp.GradScaler()), or enable_amp(dtype=torch.bfloat16)"
)

# Note [One call of a Graph]
#
#     Graph.__call__                 goes straight to `call`, unless there is something to set up, to check or to replan
#     AutoPlan.planning              with `memory_budget`: sets the policies of this call, and plans from its levels
#       call_or_replan               with `on_out_of_memory = "replan"`: repeats what is below under another plan
#         call_with_setup            prepares after a change, compares inputs, records the step
#           call                     installs the policies; the attributes of the Graph become the real modules
#             CapturedStep.call      replays a capture, or makes one, or runs what is below eagerly
#               _train               before and after: the update
#                 _forward_backward  micro-batches and the mean of their gradients: what is captured
#                   _build           one micro-batch: gradients of other steps are set aside, losses are scaled
#                     _evaluate      autocast, and the user's `build`
#             _evaluate_only         in place of `_train` without an optimizer: `_evaluate` without gradients

running_graph: ContextVar[str | None] = ContextVar("running_graph", default=None)


@final
class Setup:
    """Whether the next call needs set-up first. Holds no references, so it cannot keep a Graph alive.

    ======= ======== ==================================================================================
    is_done is_stale the next call
    ======= ======== ==================================================================================
    no      yes      resolves policies, drops captures, then sets up: at first, and after :meth:`mark_stale`
    no      no       sets up: it is recorded, compared with the first one, or planned for
    yes     no       runs the step and nothing else
    ======= ======== ==================================================================================
    """

    __slots__ = ("is_done", "is_stale")

    def __init__(self) -> None:
        self.is_done = False
        self.is_stale = True

    def mark_stale(self) -> None:
        """A module, a flag or an optimizer was set: the next call prepares anew."""
        self.is_done = False
        self.is_stale = True


class StepCall(NamedTuple):
    """The arguments of :meth:`Step.call`."""

    fields: dict[str, Any]
    """The attributes of the Graph, which are the real modules during the step."""
    build: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _advice(names: Sequence[str]) -> str:
    """Says how to make blocks keep everything.

    >>> _advice(["model.layers.3"])
    'self.model.layers[3].config.activation_checkpointing = False'
    """
    paths = (re.sub(r"[.]([0-9]+)", r"[\1]", name) for name in names)
    return " and ".join(f"self.{path}.config.activation_checkpointing = False" for path in paths)


@final
class Step:
    """The step of one Graph: the state between its calls. See Note [One call of a Graph].

    :meth:`prepare` sets ``captured``, ``_prepared``, ``_policies`` and ``_wrappers``, and through
    :meth:`sort_parameters` ``_trains``, ``_is_plain``, ``_num_groups`` and ``_unmanaged_parameters`` (those that no
    optimizer of the Graph updates). ``inputs`` are those of the first call. ``watcher`` records the first calls under
    the present policies, of which ``_num_watched`` counts how many, and those within :meth:`measure`
    (``_is_measured``); ``_must_run`` says that the present call runs in Python, to be recorded or measured.
    """

    def __init__(
        self,
        name: str,
        roots: dict[str, nn.Module],
        tree: BlockTree,
        update: Update,
        config: GraphConfig,
        debug: DebugLog,
        setup: Setup,
    ) -> None:
        self.inputs: InputCheck | None = None
        self.is_running = False
        self.num_calls = 0
        self.watcher: StepRecorder | None = None
        self.advice: Callable[[Sequence[str]], str] = _advice
        """As :attr:`StepRecorder.advice`."""
        self.name = name
        self.roots = roots
        self._tree = tree
        self.update = update
        self.config = config
        self._debug = debug
        self.setup = setup
        self._unmanaged_parameters: list[torch.Tensor] = []
        self.captured: CapturedStep | None = None
        self.metering: Callable[[], AbstractContextManager[None]] | None = None
        """Measures the present call for a plan, with ``config.memory_budget``; ``None`` if it is not measured."""
        self.module_tree: ModuleTree | None = None
        """The modules at the last backup of a step."""
        self._is_measured = False
        self._must_run = False
        self._is_plain = False
        self._num_groups = 0
        self._num_watched = 0
        self._prepared: tuple[list[Any], dict[str, str], list[str], list[tuple[str, nn.Module]]] = ([], {}, [], [])
        self._policies = ResolvedPolicies([], {}, [])
        self._trains = False
        self._wrappers: list[BlockForward] = []

    @scope
    def measure(self, undo: Undo) -> Iterator[None]:
        def end() -> None:
            self._is_measured = False
            self._num_watched = max(self._num_watched, _WATCHED_OPS)

        undo.append((end, ()))
        self._is_measured = True
        self.setup.is_done = False
        yield

    def call_with_setup(self, call: StepCall) -> Any:
        """The slow path: sets up, checks inputs or records the step. Later calls go straight to :meth:`call`."""
        _, build, args, kwargs = call
        config = self.config
        if (outer := running_graph.get()) is not None:
            raise GraphError(
                f"{self.name} is called inside of {outer}.build() · fix: a Graph cannot be nested; call its modules"
            )
        if self.setup.is_done:
            return self.call(*call)
        self.prepare()
        inputs = self.inputs or InputCheck(build, args, kwargs)
        if config.strict_static and (difference := inputs.difference(build, args, kwargs)):
            raise GraphError(
                f"{self.name}: {difference} · fix: keep inputs as they are, or config.strict_static = False"
            )
        # Of the steps that are measured for a plan, none is recorded: those under the plan are what is explained.
        records_next = config.measure and self._num_watched < _WATCHED_TIMES and self.metering is None
        is_watched = config.training and (self._is_measured or records_next)
        with ExitStack() as stack:
            if self.metering is not None:
                stack.enter_context(self.metering())
            if self._debug.level >= 0:
                stack.enter_context(self._debug.logging(self.name, self.roots))
            if is_watched:
                stack.enter_context(self._watch(args, kwargs))
            # A replay runs no Python to observe, and policies that change with each update are not worth a capture.
            self._must_run = is_watched or self._debug.level >= 0 or self.metering is not None
            try:
                output = self.call(*call)
            finally:
                self._must_run = False
        self.inputs = inputs
        self.num_calls += 1
        self._num_watched += is_watched
        setup = self.setup
        has_more = is_watched or config.strict_static or config.memory_budget is not None or self._debug.level >= 0
        # `build` may have set a flag or an attribute in this call: then the next one prepares.
        setup.is_done = not (has_more or setup.is_stale)
        return output

    def call(self, fields: dict[str, Any], build: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if self.is_running:
            raise GraphError(f"{self.name} is running in another thread · fix: call it from one thread at a time")
        roots, wrappers = self.roots, self._wrappers
        token = running_graph.set(self.name)
        self.is_running = True
        try:
            for wrapper in wrappers:
                wrapper.install()
            # Entries of `__dict__` come before `Graph.__getattr__`, which returns proxies: `self.model` in `build` is
            # the real module, at the cost of a plain attribute.
            fields.update(roots)
            run = self._train if self._trains else self._evaluate_only
            if self.captured is None:
                output = run(build, args, kwargs)
            else:
                work = partial(self._forward_backward if self._trains else self._evaluate_only, build)
                output, is_fresh = self.captured.call(partial(run, build), work, args, kwargs, must_run=self._must_run)
                if is_fresh:
                    return output
        finally:
            for name in roots:
                fields.pop(name, None)
            for wrapper in wrappers:
                wrapper.uninstall()
            self.is_running = False
            running_graph.reset(token)
        if isinstance(output, torch.Tensor) and is_new(output):
            return output.detach()
        return fresh_outputs(output, lambda: self._addresses(args, kwargs))

    @property
    def capture_text(self) -> str:
        return self.captured.describe() if self.captured is not None else ""

    def count_steps(self) -> None:
        if self.captured is not None:
            self.captured.count_steps()

    @scope
    def with_policies(self, undo: Undo, policies: list[BlockForward]) -> Iterator[None]:
        undo += [(setattr, (self, name, getattr(self, name))) for name in ("captured", "_wrappers")]
        self.captured, self._wrappers = None, policies
        yield

    def without_captures(self) -> AbstractContextManager[None]:
        return self.with_policies(self._wrappers)

    @scope
    def without_policies(self, undo: Undo) -> Iterator[None]:
        enter(undo, self.with_policies([]))
        enter(undo, disable_checkpointing())
        yield

    def prepare(self) -> None:
        if not self.setup.is_stale:
            return
        plan = resolve_policies(self.roots.items(), self._tree.configs, self.config.determinism_check)
        blocks = [
            (
                w.module,
                w.rule,
                w.placement,
                w.compile_options,
                w.only_compiles,
                w.determinism_check,
                w.early_stop,
                [ref(m) for m in w.module.modules()],
            )
            for w in plan.wrappers
            if w.module is not None
        ]
        prepared = blocks, plan.idle, plan.selected, list(self.roots.items())
        if prepared != self._prepared:  # what the wrappers have learnt, and what was watched, is still true otherwise
            self._prepared = prepared
            self._policies = plan
            self._wrappers = plan.wrappers
            self._num_watched = 0
            self.watcher = None
        self.sort_parameters()
        if self._trains and self.config.amp_dtype is torch.float16 and not self.config.has_scaler:
            warn_once(self.name, _NO_SCALER)
        if self.captured is not None:
            self.captured.release()
        update = self.update if self._trains else Update(self.name)  # an evaluation has no optimizers to step
        roots = list(self.roots.items())
        devices = dict.fromkeys(p.device for _, root in roots for p in root.parameters())
        backend = backend_for(self.config.capture, list(devices))
        self.captured = None
        if backend is not None:
            self.captured = CapturedStep(self.name, roots, backend, self.config, update)
        self.setup.is_stale = False

    def sort_parameters(self) -> None:
        updated = {id(p) for p in self.update.parameters()}
        parameters = [p for module in self.roots.values() for p in module.parameters()]
        self._unmanaged_parameters = [p for p in parameters if p.requires_grad and id(p) not in updated]
        self._num_groups = self.update.num_groups()
        self._trains = bool(updated)
        self.update.is_of_graph = not updated.isdisjoint(map(id, parameters))
        self._is_plain = self.config.is_plain and not (self._trains and self._unmanaged_parameters)

    def _watch(self, args: Any, kwargs: dict[str, Any]) -> AbstractContextManager[Any]:
        if self.watcher is None:
            self.watcher = StepRecorder(self.name, self._prepared[-1], self._policies)
            self.watcher.advice = self.advice
        if self._num_watched >= _WATCHED_OPS and not self._is_measured:
            # A step that will be captured has no other warm-up step to be checked in.
            return self.watcher.time(checks_values=self.captured is not None)
        return self.watcher.measure(tensors_in((args, kwargs)))

    def _train(self, build: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        update = self.update
        update.begin()
        try:
            if self.setup.is_done and self._is_plain:
                output = build(*args, **kwargs)
            else:
                output = self._forward_backward(build, args, kwargs)
            update.apply()
        except BaseException:
            update.abandon()
            raise
        return output

    def _forward_backward(self, build: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        count = self.config.num_micro_batches
        if count == 1:
            output = self._build(build, args, kwargs)
        else:
            batches = micro_batches(build, args, kwargs, count)
            output = pack_outputs(self._build(build, *batch) for batch in batches)
        self.update.average(count)
        return output

    def _build(self, build: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        scaler = self.update.scaler
        with ExitStack() as stack:
            if self._unmanaged_parameters and self.update.num_groups() != self._num_groups:
                self.sort_parameters()  # the user has added a group since
            stack.enter_context(preserve_grads(self._unmanaged_parameters))
            if not self.setup.is_done:
                stack.enter_context(self.update.forbidding_steps())
            scaled = stack.enter_context(ScaledBackward(scaler)) if scaler is not None else None
            output = self._evaluate(build, args, kwargs)
        if scaled is not None and not scaled.count:
            raise GraphError(f"{self.name}.build ran no loss.backward(), which is where the scaler acts · fix: call it")
        return output

    def _evaluate_only(self, build: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        try:
            with torch.no_grad():  # its outputs are detached in any case: nothing could ever run backward
                return build(*args, **kwargs) if self._is_plain else self._evaluate(build, args, kwargs)
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            raise GraphError(
                f"{self.name}.build: backward() was called, but without an optimizer the Graph evaluates, without "
                "gradients · fix: call self.add_optimizer(...) in __init__, or leave backward() out of build"
            ) from error

    def _evaluate(self, build: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        dtype = self.config.amp_dtype
        if dtype is None:
            return build(*args, **kwargs)
        devices = (parameter.device for module in self.roots.values() for parameter in module.parameters())
        with torch.autocast(next(devices, torch.device("cpu")).type, dtype):
            return build(*args, **kwargs)

    def _addresses(self, args: Any, kwargs: dict[str, Any]) -> set[int]:
        """Returns the addresses of the step's inputs and of the modules' tensors, which no output may share."""
        tensors = tensors_in((args, kwargs))
        for root in self.roots.values():
            for module in root.modules():
                for members in (module._parameters, module._buffers, module.__dict__):
                    tensors += [value for value in members.values() if isinstance(value, torch.Tensor)]
        plain = [p for t in tensors for p in (inner_tensors(t) if hasattr(t, "__tensor_flatten__") else (t,))]
        return {t.untyped_storage().data_ptr() for t in plain if t.layout is torch.strided}


def micro_batches(
    build: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], count: int
) -> Iterator[tuple[Sequence[Any], dict[str, Any]]]:
    """Yields the arguments of each micro-batch: every tensor's slice of dim 0, all else as it is."""
    leaves, shape = flatten_call(args, kwargs)
    chunks: dict[int, Sequence[torch.Tensor]] = {}
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            if leaf.shape[0] % count or not leaf.shape[0]:
                raise GraphError(
                    f"input `{shape.name(position, build)}` of shape {list(leaf.shape)} cannot be cut into {count} "
                    f"micro-batches · fix: make its dim 0 a multiple of {count}, the gradient accumulation steps"
                )
            chunks[position] = leaf.chunk(count)
    for number in range(count):
        yield shape.assemble([chunks[i][number] if i in chunks else leaf for i, leaf in enumerate(leaves)])


def pack_outputs(outputs: Iterable[Any]) -> Any:
    """Joins the outputs of the micro-batches: stacks what has no dimension, concatenates the rest on dim 0."""
    flat = [flatten_value(output) for output in outputs]
    detached = [[x.detach() if isinstance(x, torch.Tensor) else x for x in leaves] for leaves, _ in flat]
    if len({len(leaves) for leaves in detached}) > 1:
        counts = ", ".join(str(len(leaves)) for leaves in detached)
        raise GraphError(f"build returned {counts} values for the micro-batches · fix: return the same ones for each")
    packed: list[Any] = []
    for leaves in zip(*detached, strict=True):
        if isinstance(first := leaves[0], torch.Tensor):
            packed.append(torch.cat(leaves) if first.dim() else torch.stack(leaves))
        else:
            packed.append(first if all(leaf is first or leaf == first for leaf in leaves) else list(leaves))
    return build_value(flat[0][1], packed)


def fresh_outputs(output: Any, alive: Callable[[], set[int]]) -> Any:
    """Detaches the tensors of ``output``, and copies those whose storage is at one of the addresses in ``alive()``."""
    if type(output) is dict and all(isinstance(value, torch.Tensor) and is_new(value) for value in output.values()):
        return {name: value.detach() for name, value in output.items()}  # in a third of the time
    leaves, spec = flatten_value(output)
    addresses: set[int] | None = None
    fresh = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and not is_new(leaf):
            addresses = alive() if addresses is None else addresses
            shared = leaf.layout is torch.strided and leaf.untyped_storage().data_ptr() in addresses
            fresh.append(leaf.detach().clone() if shared else leaf.detach())
        else:
            fresh.append(leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)
    return build_value(spec, fresh)


def is_new(tensor: torch.Tensor) -> bool:
    """Whether an op has allocated the memory of ``tensor``; where this is not sure, it returns False."""
    # An op that works in place raises the version, and one that returns a slice of its input makes a view. Such an
    # output may be a parameter's memory, which the next update overwrites while the caller still has it.
    return tensor.grad_fn is not None and not tensor._version and not tensor._is_view()
