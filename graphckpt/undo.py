"""Notes how to restore what a recomputation or a ``with`` block changes, so that Ctrl-C at any moment leaves nothing.

A recomputation has no ``with``, and mostly nothing to restore: an ``ExitStack`` takes 0.6 us there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager, suppress
from functools import partial, wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeAlias, TypeVar, final, overload
from weakref import ref

Undo: TypeAlias = list[tuple[Callable[..., object], tuple[Any, ...]]]
"""Functions and their arguments, noted before each change, so that an interrupt finds them. Each sets what was there,
and does not reverse a step: an interrupt may come before the change, or between a restoration and its removal from the
list, which repeats it."""


def put_back(undo: Undo) -> None:
    """Undoes all, from the last to the first, and empties the list; an error in one does not stop the others."""
    while undo:
        function, args = undo[-1]
        try:
            function(*args)
        except BaseException:
            with suppress(Exception):  # again: an interrupt may have come before it has done anything
                function(*args)
            undo.pop()
            put_back(undo)
            raise
        undo.pop()


# Note [A `with` that ends surely]
#
# Ctrl-C may come at the first instruction of an `__exit__`, or between the lines of its `finally`. `contextmanager` and
# `ExitStack` then end with half of their work done. In a function of the library a frame outside could do the rest, but
# a user's `with handle.measure():` has none of ours around it.
#
# It has an object: from before it calls `__enter__` until it is over, whatever is raised, the interpreter holds what it
# is to call as `__exit__`. `Ending` makes that a `partial` that nothing else refers to: functions that a partial calls
# get its arguments, so not even a traceback that is kept, as IPython and `pdb` keep the last one, refers to it. It is
# freed in the moment in which the `with` is over; if it has not been called to its end by then, the rest is done.
#
# A context manager that an `ExitStack` enters is not protected: the stack looks `__exit__` up in the class. Within a
# scope, `enter` does what is needed instead.


@final
class Ending:
    """The ``__exit__`` of a class. See Note [A `with` that ends surely].

    Args:
        end: The usual method.
        abandon: Called if Ctrl-C comes before ``end`` has returned, with what ``state_of`` has returned before
            ``__enter__``: sets what was there, as entries of an undo list do.
    """

    def __init__(
        self, end: Callable[..., Any], abandon: Callable[[Any, Any], object], state_of: Callable[[Any], Any] = type
    ) -> None:
        self._end, self._abandon, self._state_of = end, abandon, state_of

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        if instance is None:
            return self._end
        is_over: list[bool] = []
        ending = partial(_end, self._end, is_over, instance)
        state = self._state_of(instance)
        # Not `weakref.finalize`, which takes 2 us more: the value check hides its ops twice for each saved tensor.
        _endings.add(ref(ending, partial(_abandon, self._abandon, is_over, instance, state)))
        return ending


_endings: set[ref[Any]] = set()
"""Of each ``with`` that is not over, what abandons it when its ``partial`` is freed."""


def _end(end: Callable[..., Any], is_over: list[bool], instance: Any, *error: Any) -> Any:
    try:
        result = end(instance, *error)
    except Exception:
        is_over.append(True)
        raise
    is_over.append(True)
    return result


def _abandon(
    abandon: Callable[[Any, Any], object], is_over: list[bool], instance: Any, state: Any, ending: ref[Any]
) -> None:
    _endings.discard(ending)
    if not is_over:
        abandon(instance, state)


P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")


@final
class Scope(ContextDecorator, AbstractContextManager[T], Generic[T]):
    """A context manager that :func:`scope` makes."""

    def __init__(self, begin: Callable[[Undo], Iterator[T]]) -> None:
        self._begin = begin
        self._undo: Undo = []
        self._generator: Any = begin(self._undo)  # a generator: `contextmanager` asks for an iterator as well
        self._manager: AbstractContextManager[T] = contextmanager(lambda: self._generator)()

    def _recreate_cm(self) -> Scope[T]:  # `ContextDecorator` enters a new one in each call
        return Scope(self._begin)

    def __enter__(self) -> T:
        return self._manager.__enter__()

    def _exit(self, *error: Any) -> bool | None:
        try:
            return self._manager.__exit__(*error)
        finally:
            put_back(self._undo)

    def close(self, _: object = None) -> None:
        """Ends it, wherever it is; a second call does nothing."""
        try:
            self._generator.close()
        finally:
            put_back(self._undo)

    __exit__ = Ending(_exit, close)


@overload
def scope(function: Callable[Concatenate[Undo, P], Iterator[T]]) -> Callable[P, Scope[T]]: ...
@overload
def scope(
    function: Callable[Concatenate[S, Undo, P], Iterator[T]],
) -> Callable[Concatenate[S, P], Scope[T]]: ...
def scope(function: Any) -> Any:
    """Makes a context manager of a generator function, as ``contextmanager`` does, for what sets state that remains.

    The function has ``undo`` as its first parameter, or its first behind ``self``, and notes there how to restore what
    it sets, before it sets it. That is done when the ``with`` is over, even if Ctrl-C comes while it is entered or
    left: state of the process, of a thread, or of a user's model is never set for a time in another way.
    """
    position = function.__code__.co_varnames.index("undo")

    @wraps(function)
    def make(*args: Any, **kwargs: Any) -> Scope[Any]:
        return Scope(lambda undo: function(*args[:position], undo, *args[position:], **kwargs))

    return make


def enter(undo: Undo, inner: Scope[T]) -> T:
    """Enters a scope until ``undo``."""
    undo.append((inner.close, ()))
    return inner.__enter__()
