"""The shared library, loaded before PyTorch; its errors as PyTorch's exceptions."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from typing import Any

from simulated_cuda.build import build, torch_folder

SCHEDULES = ("lazy", "eager", "random")

_RETURNS: dict[str, Any] = {
    "last_error": ctypes.c_char_p,
    "memory_report_json": ctypes.c_char_p,
    "error_string": ctypes.c_char_p,
    "graph_new": ctypes.c_void_p,
    "pool_new": ctypes.c_uint64,
    "host_num_pinned_bytes": ctypes.c_uint64,
}
_UINT, _INT, _POINTER = ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p
_ARGUMENTS: dict[str, list[Any]] = {
    "use_schedule": [_INT, _UINT],
    "set_stream": [_INT],
    "event_elapsed": [_POINTER, _POINTER, ctypes.POINTER(ctypes.c_double)],
    "graph_delete": [_POINTER],
    "graph_begin": [_POINTER, _UINT, _UINT, _INT],
    "graph_end": [_POINTER],
    "graph_replay": [_POINTER],
    "graph_reset": [_POINTER],
    "graph_pool": [_POINTER, ctypes.POINTER(_UINT)],
    "pool_begin_allocate": [_UINT, _UINT],
    "pool_end_allocate": [_UINT, _UINT],
    "pool_release": [_UINT, _UINT],
    "memory_set_total": [_UINT],
    "memory_info": [ctypes.POINTER(_UINT)],
    "host_register": [_UINT, _UINT],
    "host_unregister": [_UINT],
    "error_string": [_INT],
}


@cache
def load() -> ctypes.CDLL:
    """Loads the library, and PyTorch's before it.

    Raises:
        RuntimeError: PyTorch is imported already: it has looked for CUDA, and has not found it.
    """
    if "torch" in sys.modules:
        raise RuntimeError("the simulated CUDA device must be loaded before torch is imported")
    path = build()
    ctypes.CDLL(str(torch_folder() / "lib" / "libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(path), mode=os.RTLD_NOW)
    for name, kind in _RETURNS.items():
        getattr(library, name).restype = kind
    for name, kinds in _ARGUMENTS.items():
        getattr(library, name).argtypes = kinds
    return library


def call(name: str, *arguments: Any) -> None:
    """Calls a function of the library.

    Raises:
        RuntimeError, torch.AcceleratorError, torch.OutOfMemoryError: The device's error.
    """
    kind = getattr(load(), name)(*arguments)
    if kind:
        import torch  # noqa: PLC0415 - must not be imported before the library is loaded

        error = (RuntimeError, torch.AcceleratorError, torch.OutOfMemoryError)[kind - 1]
        raise error(load().last_error().decode())


def use_schedule(schedule: str) -> None:
    """Synchronizes the device, and runs it by ``schedule`` from now on: ``lazy``, ``eager`` or ``random:SEED``."""
    name, _, seed = schedule.partition(":")
    if name not in SCHEDULES or bool(seed) != (name == "random") or (seed and not seed.isdigit()):
        raise ValueError(f"expected lazy, eager or random:SEED, got {schedule!r}")
    call("use_schedule", SCHEDULES.index(name), int(seed or 0))
