"""The settings of a thread that a block depends on: RNG states, autocast, defaults of tensors, attention kernels."""

from __future__ import annotations

import ctypes
import functools
import random
import sys
import threading
import weakref
from collections.abc import Iterable
from math import nan
from operator import call
from typing import Any, NamedTuple, TypeAlias, final

import torch

from graphckpt._compat import (
    active_modes,
    attention_kernels_enabled,
    call_with_autocast,
    foreign_modes,
    is_any_autocast_enabled,
    is_watched,
    num_function_modes,
    num_other_threads,
    push_modes,
    set_active_modes,
)
from graphckpt._compat_compiler import DispatchMode, never_compiled
from graphckpt.undo import Undo

RNGState: TypeAlias = "tuple[torch.Tensor, tuple[tuple[torch.device, torch.Tensor], ...], HostRNGState | None]"
"""State of PyTorch's CPU generator, of each device's default generator, and of Python and NumPy if requested."""

_STATELESS = frozenset({"cpu", "meta"})  # device types without a generator


class HostRNGState(NamedTuple):
    """State of the global generators of Python and NumPy. To read both takes 40 us, most of it in NumPy."""

    python: tuple[Any, ...]
    numpy: dict[str, Any] | None
    """``None`` if NumPy is not imported."""

    @classmethod
    def read(cls) -> HostRNGState:
        numpy = _numpy_random()
        return cls(random.getstate(), None if numpy is None else numpy.get_state(legacy=False))

    def restore(self) -> None:
        random.setstate(self.python)
        if self.numpy is not None:
            _numpy_random().set_state(self.numpy)

    def changes(self) -> list[str]:
        """Returns which libraries have drawn since: ``"Python's random"``, ``"NumPy"``."""
        now = HostRNGState.read().fingerprints()
        return [library for library, number in self.fingerprints().items() if now[library] != number]

    def fingerprints(self) -> dict[str, int]:
        hashes = {"Python's random": hash(self.python)}
        if self.numpy is not None:
            values = (*self.numpy.values(), *self.numpy["state"].values())  # the key of MT19937 is an array
            hashes["NumPy"] = hash(
                tuple(v.tobytes() if hasattr(v, "tobytes") else v for v in values if v is not self.numpy["state"])
            )
        return hashes


def rng_devices(tensors: Iterable[torch.Tensor]) -> tuple[torch.device, ...]:
    return tuple(dict.fromkeys(t.device for t in tensors if t.device.type not in _STATELESS))


_generator = torch.default_generator


def get_rng_state(devices: tuple[torch.device, ...], *, host: bool = False) -> RNGState:
    cpu_state = _generator.get_state()
    host_state = HostRNGState.read() if host else None
    if not devices:
        return cpu_state, (), host_state
    return cpu_state, tuple([(d, torch.get_device_module(d).get_rng_state(*_index(d))) for d in devices]), host_state


def set_rng_state(state: RNGState) -> None:
    cpu_state, device_states, host_state = state
    _generator.set_state(cpu_state)
    for device, device_state in device_states:
        torch.get_device_module(device).set_rng_state(device_state, *_index(device))
    if host_state is not None:
        host_state.restore()


# Note [Threads that draw from one generator]
#
# PyTorch's default generators are those of the process. A thread that draws during a call of a block in another thread
# advances them there, or here while a recomputation has set them back, and masks of dropout differ silently. So the
# state at the end of a call is compared with that at the end of its recomputation, if there is another thread at all.
# Where another thread runs a block meanwhile, equal states say nothing: its forward may draw as many numbers in both,
# and its recomputation sets the generator back and forth. Only if the block itself draws, that is an error.
#
# In thread A, on the same devices as thread B, `num_calls_elsewhere` is
#
#     3      at the begin of a call: B has run 3 calls
#     3      at its end: undisturbed, if B has run none meanwhile
#     4      B has begun and ended one: disturbed
#     nan    B is in one: disturbed, as nan equals nothing, not even the nan of the begin

_calls: dict[int, tuple[int, weakref.ref[Any], tuple[torch.device, ...]]] = {}
"""By thread: how many executions have begun in it, the last of them, and the devices that it runs on."""


def enter_call(run: Any, devices: tuple[torch.device, ...], *, is_outermost: bool = True) -> float:
    """Notes that an execution begins, which is over when it is not active, and returns :func:`num_calls_elsewhere`."""
    if is_outermost:
        thread = threading.get_ident()
        number = _calls[thread][0] if thread in _calls else 0
        _calls[thread] = number + 1, weakref.ref(run), devices
    return 0 if len(_calls) == 1 else num_calls_elsewhere(devices)


def num_calls_elsewhere(devices: tuple[torch.device, ...]) -> float:
    """Returns a number that is another one if another thread has run a block meanwhile, on the same devices.

    It is NaN, which equals no number, while such a thread does so.
    """
    thread = threading.get_ident()
    if len(_calls) == 1 and thread in _calls:
        return 0
    calls = [call for each, call in _calls.copy().items() if each != thread and call[2] == devices]
    is_any_active = any((run := ref()) is not None and run.is_active for _, ref, _ in calls)
    return nan if is_any_active else sum(number for number, *_ in calls)


class SharedState(NamedTuple):
    """The state after a call of generators that other threads may draw from."""

    state: RNGState
    is_disturbed: bool
    """Whether another thread has run a block during the call."""

    def differs(self, devices: tuple[torch.device, ...], num_calls: float) -> bool:
        """Whether a recomputation, at whose begin there were ``num_calls`` elsewhere, may have drawn other numbers."""
        if self.is_disturbed or num_calls != num_calls_elsewhere(devices):
            return True
        cpu_state, device_states, _ = get_rng_state(devices)
        # Of a block on a device, the CPU's does not count: other threads draw from it to prepare data.
        if devices:
            pairs = zip(self.state[1], device_states, strict=True)
            return any(_bytes_of(then) != _bytes_of(now) for (_, then), (_, now) in pairs)
        return _bytes_of(self.state[0]) != _bytes_of(cpu_state)


def _bytes_of(state: torch.Tensor) -> bytes:  # no op, which the modes of a block would take for one of its own
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def shared_state(devices: tuple[torch.device, ...], num_calls: float) -> SharedState | None:
    """Returns the state after a call, at whose begin there were ``num_calls`` elsewhere.

    It is ``None`` without another thread; of a device those count that have called a block, as it is slow to read.
    """
    is_alone = len(_calls) < 2 if devices else not num_other_threads()
    if is_alone or is_watched() or num_function_modes():
        return None
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return None
    return SharedState(get_rng_state(devices), num_calls != num_calls_elsewhere(devices))


@final
class DrawFinder(DispatchMode):
    """Finds the first op that draws random numbers without a generator of the program's own."""

    def __init__(self) -> None:
        super().__init__()
        self.op = ""

    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not self.op and torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            self.op = str(func)
        return call_with_autocast(func, args, kwargs)


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # torch.mps has one device and takes no index


def _numpy_random() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random  # NumPy imports it on first use, which may be in the block


Ambient: TypeAlias = tuple[object, ...]
"""``((default device, default dtype), attention kernels, (device type, enabled, dtype, weight cache), ...)``."""


def take_ambient(devices: tuple[torch.device, ...]) -> Ambient:
    kernels = _math_enabled(), _flash_enabled(), _efficient_enabled(), _cudnn_enabled()
    device = torch.get_default_device() if num_function_modes() else _CPU  # a mode, which it looks for in Python
    defaults = device, torch.get_default_dtype()
    if not devices:
        return defaults, kernels, _autocast("cpu") if is_any_autocast_enabled() else _NO_AUTOCAST
    kinds = dict.fromkeys(device.type for device in devices)
    return defaults, kernels, _autocast("cpu"), *(_autocast(kind) for kind in kinds)


def enter_ambient(undo: Undo, wanted: Ambient, now: Ambient) -> None:
    """Applies the differences of ``wanted`` from ``now``, which ``undo`` restores."""
    (device, dtype), kernels, *autocasts = wanted  # type: ignore[misc]
    device_now, dtype_now = now[0]  # type: ignore[misc]
    if device != device_now:  # type: ignore[has-type]
        undo.append((set_active_modes, (active_modes(),)))
        device.__enter__()  # type: ignore[has-type]  # a torch.device is a context manager, and its mode the default
    if dtype is not dtype_now:  # type: ignore[has-type]
        undo.append((torch.set_default_dtype, (dtype_now,)))  # type: ignore[has-type]
        torch.set_default_dtype(dtype)  # type: ignore[has-type]
    if kernels != now[1]:
        undo.append((_enable_kernels, (now[1],)))
        _enable_kernels(kernels)  # type: ignore[arg-type]
    is_other = tuple(autocasts) != now[2:]
    if not (is_other or is_autocast(now)):
        return
    kinds = [autocast[0] for autocast in autocasts]  # type: ignore[index]
    # `backward()` was called in a region of autocast, maybe by another thread. The cache is the process's, and has the
    # casts of the forward of that region, which clears it; no region that ends in this thread may do so before.
    undo.append((_set_autocast, (_autocast_now(kinds), not is_autocast(now))))
    torch.autocast_increment_nesting()
    if is_other:
        for kind, enabled, *how in autocasts:  # type: ignore[misc]
            if how:  # type: ignore[has-type]
                torch.set_autocast_dtype(kind, how[0])  # type: ignore[has-type]
                torch.set_autocast_cache_enabled(how[1])  # type: ignore[has-type]
            torch.set_autocast_enabled(kind, enabled)  # type: ignore[has-type]


def enter_modes(undo: Undo, modes: tuple[tuple[Any, ...], tuple[Any, ...]]) -> None:
    """Makes active those of ``modes`` that are not now, until ``undo``. What is active now alone stays so."""
    undo.append((set_active_modes, (active_modes(),)))
    push_modes(
        *(
            [mode for mode in each if not any(mode is other for other in present)]
            for each, present in zip(modes, foreign_modes(), strict=True)
        )
    )


def _enable_kernels(kernels: Iterable[bool]) -> None:
    for enable, is_on in zip(_ENABLE_KERNELS, kernels, strict=True):
        enable(is_on)


def _autocast_now(kinds: Iterable[str]) -> tuple[int, bool, list[tuple[str, bool, torch.dtype]]]:
    """Returns how deep autocast regions are nested in this thread, whether they cache, and the settings of each kind.

    Of a kind for which autocast is off too: the dtype that it would have is a setting that lasts.
    """
    settings = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    return _autocast_nesting(), torch.is_autocast_cache_enabled(), settings


def _autocast_nesting() -> int:
    # In one call of C: an interrupt between the two would leave autocast nested, and its cache never cleared.
    return min(map(call, (torch.autocast_increment_nesting, torch.autocast_decrement_nesting)))


def _set_autocast(now: tuple[int, bool, list[tuple[str, bool, torch.dtype]]], clears_cache: bool) -> None:
    nesting, is_cache_enabled, settings = now
    for _ in range(_autocast_nesting() - nesting):
        torch.autocast_decrement_nesting()
    if clears_cache and not nesting:
        torch.clear_autocast_cache()
    for kind, enabled, dtype in settings:
        torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_enabled(kind, enabled)
    torch.set_autocast_cache_enabled(is_cache_enabled)


def is_autocast(ambient: Ambient) -> bool:
    return ambient[2] is not _NO_AUTOCAST and any(autocast[1] for autocast in ambient[2:])  # type: ignore[index]


_CPU = torch.device("cpu")
_NO_AUTOCAST = "cpu", False
_math_enabled, _flash_enabled, _efficient_enabled, _cudnn_enabled = attention_kernels_enabled
_ENABLE_KERNELS = (
    torch.backends.cuda.enable_math_sdp,
    torch.backends.cuda.enable_flash_sdp,
    torch.backends.cuda.enable_mem_efficient_sdp,
    torch.backends.cuda.enable_cudnn_sdp,
)

_has_autocast = functools.cache(torch.amp.is_autocast_available)


def _autocast(kind: str) -> tuple[object, ...]:
    if not (kind == "cpu" or _has_autocast(kind)) or not torch.is_autocast_enabled(kind):
        return kind, False
    return kind, True, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
