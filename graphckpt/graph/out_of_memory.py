"""Replans a Graph whose step ran out of memory, and repeats the step."""

from __future__ import annotations

import gc
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch

from graphckpt.errors import ConfigError, drop_frames, first_line
from graphckpt.training_state import ModuleTree, TrainingState
from graphckpt.tree import tensors_in

if TYPE_CHECKING:
    from graphckpt.graph.step import Step, StepCall

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

# Note [A step that is repeated]
#
#     backup       copies what forward and backward change: buffers, attributes, RNG states. Not parameters and
#                  states of optimizers, as many bytes as all of the model: only the update changes them
#     step         runs out of memory; if the update had begun, or the step has written to a parameter or an input,
#                  it is not repeated (`lasting_change`)
#     restore
#     _free        in this order: the traceback holds frames, and these the tensors of the step; captures hold pools;
#                  then the collector can find what is left, and the allocator return it
#     replan       makes a plan for the memory that is free now, and the step runs again
#     once more    with the plan of the lowest peak, if that was not enough; then the first error is raised, with notes

_PHRASES = (
    *("can't allocate memory", "not enough memory", "bad_alloc"),  # the CPU allocators raise RuntimeErrors
    # So does CUDA outside of PyTorch's allocator: when it loads a kernel, or a library allocates its workspace.
    *("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether ``error`` is an out-of-memory error.

    >>> is_out_of_memory(torch.OutOfMemoryError()), is_out_of_memory(RuntimeError("shapes differ"))
    (True, False)
    """
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _PHRASES)
    )


def raises_out_of_memory() -> bool:
    """Returns whether an allocation fails with an error when memory is used up.

    It does on an accelerator, and on a host where the process has a limit (``ulimit -v``) or the system grants no more
    than it has. Otherwise Linux and macOS grant any amount, and end the process once too much of it is used: there is
    no step to repeat then.
    """
    if torch.accelerator.current_accelerator(check_available=True) is not None or sys.platform not in (
        "linux",
        "darwin",
    ):
        return True
    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    return any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits) or _grants_no_more()


@cache
def _grants_no_more() -> bool:
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text(encoding="ascii").strip() == "2"
    except OSError:
        return False


@final
class StepBackup:
    """The state before a step, without parameters and optimizer states, which only the update changes.

    It copies as many bytes as the buffers, and the tensors that are attributes of modules, have.
    """

    def __init__(self, step: Step, call: StepCall) -> None:
        self._step = step
        roots = step.roots.values()
        if step.module_tree is None or not step.module_tree.is_of(roots):
            step.module_tree = ModuleTree(roots)
        tree = step.module_tree
        tensors = [value for value in tree.attributes() if issubclass(type(value), torch.Tensor)]
        # An embedding with `max_norm` changes its weight in forward.
        copied = [*tree.buffers(), *tensors, *(m.weight for m in tree.renormalized)]
        self._state = TrainingState(copied, tree=tree, fields=call.fields)
        constant = [*tree.parameters(), *tensors_in((call.args, call.kwargs))]
        if copied:
            ids = set(map(id, copied))
            constant = [tensor for tensor in constant if id(tensor) not in ids]
        self._versions = [(tensor, tensor._version) for tensor in constant if not tensor.is_inference()]
        self._num_replays = self._count_replays()

    def _count_replays(self) -> int:
        captured = self._step.captured
        return 0 if captured is None else captured.num_replays

    def lasting_change(self) -> str | None:
        """Returns the state that the step has changed and that cannot be restored, or ``None``."""
        if self._step.update.has_begun or self._count_replays() != self._num_replays:
            return "the update of the parameters had begun"
        if any(tensor._version != version for tensor, version in self._versions):
            return "the step had modified a parameter or an input in place"
        return None

    def restore(self) -> None:
        self._state.restore()


def call_or_replan(step: Step, replan: Callable[..., str], call: StepCall) -> Any:
    """Runs the step; if memory runs out, restores the state, plans for the free memory, and repeats the step.

    If that is not enough, the plan with the lowest peak is tried before it gives up. Where no allocation fails, see
    :func:`raises_out_of_memory`, no step can be repeated, and the step costs nothing more.

    Args:
        step: The step of a Graph.
        replan: Applies another plan, given the backup of the state and the call, with ``is_lowest`` the one with the
            lowest peak; returns what has changed.
        call: The call to run.

    Raises:
        ConfigError: Several processes train together: the others would wait for this one.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        num_ranks = torch.distributed.get_world_size()
        if num_ranks > 1:
            what = f"expected one process, got a process group of {num_ranks} ranks"
            raise ConfigError(f"{step.name}.config.on_out_of_memory: {what} · fix: on_out_of_memory = 'raise'")
    backup = StepBackup(step, call) if raises_out_of_memory() else None
    try:
        return step.call_with_setup(call)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        failure = error
    if backup is None:
        what = "this process has no memory limit, so that a step is not backed up before it runs"
        failure.add_note(f"{step.name}: not replanned: {what} · fix: a smaller batch, or a limit (ulimit -v)")
        raise failure
    if (change := backup.lasting_change()) is not None:
        failure.add_note(f"{step.name}: not replanned, since {change} · fix: a smaller batch")
        raise failure
    backup.restore()
    _free(step, failure)
    texts = []
    for is_lowest in (False, True):
        try:
            texts.append(replan(backup, call, is_lowest=is_lowest))
        except Exception as fault:  # user code on fake tensors may raise anything
            if texts:  # the plan that failed was the lowest one
                break
            failure.add_note(f"{step.name}: not replanned: {first_line(fault)}")
            raise failure from None
        warnings.warn(f"{step.name}: memory ran out; the step is repeated: {texts[-1]}", stacklevel=4)
        try:
            return step.call_with_setup(call)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error) or backup.lasting_change() is not None:
                raise
            repeated = error
        backup.restore()
        _free(step, repeated)
    failure.add_note(f"{step.name}: memory ran out again after replanning: {'; '.join(texts)} · fix: a smaller batch")
    raise failure


def describe_policies(names: Iterable[str]) -> str:
    """Returns how many blocks have each policy.

    >>> describe_policies(["full", "keep", "full"])
    '2x full, 1x keep'
    """
    return ", ".join(f"{count}x {name}" for name, count in Counter(names).items())


def _free(step: Step, error: BaseException) -> None:
    """Frees the memory of the failed step: that of its traceback, captures, and unused blocks of the allocator."""
    drop_frames(error, "where memory ran out")
    if step.captured is not None:
        step.captured.release()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
