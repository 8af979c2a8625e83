"""Memory that no op shows: storages that are resized, and the gradient buckets of DistributedDataParallel."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, final

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from graphckpt.undo import Undo, scope

ResizeListener = Callable[[torch.UntypedStorage], None]

_lock = threading.RLock()  # the collector may end a scope at any moment
_listeners: list[ResizeListener] = []
_uninstall: list[Callable[[], None]] = []
"""Removes the replacement of ``resize_`` while there is one."""


@scope
def resizes_reported_to(undo: Undo, listener: ResizeListener) -> Iterator[None]:
    """Calls ``listener`` with each storage that ``UntypedStorage.resize_`` resizes, in any thread, right after it.

    FSDP frees and gathers weights so, and no dispatch mode sees it. PyTorch's ``MemTracker`` replaces the method
    as well, for want of a hook. The method is PyTorch's again once the last listener has left.
    """

    def end() -> None:
        with _lock:
            if listener in _listeners:
                _listeners.remove(listener)
            if not _listeners and _uninstall:
                _uninstall[0]()
                _uninstall.clear()

    undo.append((end, ()))
    with _lock:
        if not _listeners:
            _report_resizes()
        _listeners.append(listener)
    yield


def _report_resizes() -> None:
    """Replaces ``UntypedStorage.resize_``."""
    storage_class: Any = torch.UntypedStorage
    other = vars(storage_class).get("resize_")  # a replacement by another program; PyTorch's is in a base class
    resize = storage_class.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        for listener in tuple(_listeners):
            listener(storage)
        return result

    def uninstall() -> None:
        if vars(storage_class).get("resize_") is not resize_:
            return  # replaced again by another program, which calls this one: there are no listeners any more
        if other is None:
            del storage_class.resize_
        else:
            storage_class.resize_ = other

    _uninstall[:] = [uninstall]
    storage_class.resize_ = resize_


@final
class _BucketReader(TorchDispatchMode):
    """Collects the tensors that a reducer would make zeros like, and allocates none."""

    def __init__(self) -> None:
        super().__init__()
        self.buckets: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is not torch.ops.aten.zeros_like.default:
            return func(*args, **(kwargs or {}))
        self.buckets.append(args[0])
        return args[0]


def gradient_buckets(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the buckets in which DistributedDataParallel reduces the gradients of any of ``parameters``.

    They are a copy of all gradients, from the moment that the module is wrapped, or with ``gradient_as_bucket_view``
    the gradients themselves. Neither the model nor its parameters refer to the wrapper, so the garbage collector is
    asked for it: 0.1 s for a million objects, and only if there is a process group. Types are looked up in a set, as
    ``isinstance`` asks the class of each object, which costs ten times as much.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return []
    trained = {id(parameter) for parameter in parameters if parameter.requires_grad}
    classes = _with_subclasses(DistributedDataParallel)
    wrappers = [each for each in _all_objects() if type(each) in classes]
    buckets: list[torch.Tensor] = []
    for wrapper in wrappers:
        reducer = getattr(wrapper, "reducer", None)
        if reducer is None or trained.isdisjoint(map(id, wrapper.parameters())):
            continue
        # The bucket of a sparse gradient does not exist before the first backward, which is a RuntimeError.
        with _BucketReader() as reader, suppress(RuntimeError):
            reducer._get_zeros_like_grad_buckets()
        buckets += reader.buckets
    return buckets


def _all_objects() -> list[Any]:
    """Returns what the garbage collector tracks, with what a program or a plan has frozen, which stays so."""
    if not gc.get_freeze_count():
        return gc.get_objects()
    gc.collect()  # of what is not frozen yet: garbage would stay
    gc.unfreeze()
    try:
        return gc.get_objects()
    finally:
        gc.freeze()


def _with_subclasses(base: type) -> set[type]:
    return {base}.union(*map(_with_subclasses, base.__subclasses__()))
