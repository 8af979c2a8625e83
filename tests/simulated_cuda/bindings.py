"""The part of `torch._C` that a CUDA build has and a CPU build has not, as far as the simulated device goes.

`torch.cuda` is PyTorch's own code on top of it. What is left out, such as IPC, raises AttributeError there.
"""

from __future__ import annotations

import ctypes
import enum
import importlib
import importlib.abc
import json
import sys
import uuid
import weakref
from collections.abc import Iterable
from inspect import isfunction
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any, Self

from simulated_cuda.build import torch_folder
from simulated_cuda.library import call, load

NAME = "Simulated CUDA device"
_MODES = ("global", "thread_local", "relaxed")
_TOTAL_BYTES = 16 * 2**30


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname == "torch.cuda":
            sys.meta_path.remove(self)
            install(sys.modules["torch._C"])


def install_on_import() -> None:
    """Installs the bindings when `torch.cuda` is imported: `torch._C` is there by then."""
    sys.meta_path.insert(0, _Finder())


class cudaError(enum.IntEnum):
    success = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorNotReady = 34


class Cudart(ModuleType):
    """The functions of CUDA's runtime that PyTorch passes on."""

    cudaError = cudaError

    @staticmethod
    def cudaGetErrorString(error: int) -> str:
        return str(load().error_string(int(error)).decode())

    @staticmethod
    def cudaHostRegister(address: int, num_bytes: int, flags: int) -> int:
        return int(load().host_register(address, num_bytes))

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        return int(load().host_unregister(address))

    @staticmethod
    def cudaMemGetInfo(device: int) -> tuple[int, int]:
        pair = (ctypes.c_uint64 * 2)()
        load().memory_info(pair)
        return pair[0], pair[1]

    @staticmethod
    def cudaProfilerStart() -> int:
        return 0

    cudaProfilerStop = cudaProfilerStart


class CUDAGraph:
    """Base of `torch.cuda.CUDAGraph`."""

    def __new__(cls, keep_graph: bool = False) -> Self:
        graph = super().__new__(cls)
        graph._handle = load().graph_new()
        graph._finalizer = weakref.finalize(graph, load().graph_delete, graph._handle)
        return graph

    _handle: int

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        if capture_error_mode not in _MODES:
            raise RuntimeError(f"Unknown capture error mode. Expected one of {_MODES}, got {capture_error_mode}")
        call("graph_begin", self._handle, *(pool or new_pool()), _MODES.index(capture_error_mode))

    def capture_end(self) -> None:
        call("graph_end", self._handle)

    def replay(self) -> None:
        call("graph_replay", self._handle)

    def reset(self) -> None:
        call("graph_reset", self._handle)

    def pool(self) -> tuple[int, int]:
        pair = (ctypes.c_uint64 * 2)()
        call("graph_pool", self._handle, pair)
        return pair[0], pair[1]


def new_pool() -> tuple[int, int]:
    return 0, int(load().pool_new())


def memory_stats(device: int) -> dict[str, Any]:
    report = json.loads(load().memory_report_json())
    names = ("current", "peak", "allocated", "freed")
    nothing = dict.fromkeys(names, 0)
    stats: dict[str, Any] = {"inactive_split_bytes": dict.fromkeys(("all", "small_pool", "large_pool"), nothing)}
    for key in ("allocated_bytes", "reserved_bytes", "requested_bytes", "allocation"):
        of_all = dict(zip(names, report[key], strict=True))
        stats[key] = {"all": of_all, "small_pool": nothing, "large_pool": of_all}
    stats["active_bytes"], stats["active"] = stats["allocated_bytes"], stats["allocation"]
    return stats | {key: report[key] for key in ("num_alloc_retries", "num_ooms")}


def memory_snapshot(*_: object) -> dict[str, Any]:
    segments = json.loads(load().memory_report_json())["segments"]
    for segment in segments:
        segment["segment_pool_id"] = tuple(segment["segment_pool_id"])
        segment["blocks"] = []
    return {"segments": segments, "device_traces": []}


def clone_storage(storage: Any) -> Any:
    """Replaces `UntypedStorage.clone`, whose constructor knows the devices of the build."""
    import torch  # noqa: PLC0415 - must not be imported before the library is loaded

    own = torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device).untyped_storage()
    return own.copy_(storage, False)


def hide_frames(functions: Iterable[Any]) -> None:
    """Makes tracebacks through ``functions`` end in PyTorch's files, as on a CUDA build."""
    path = str(torch_folder() / "_C.py")

    def hidden(code: CodeType) -> CodeType:
        constants = tuple(hidden(c) if isinstance(c, CodeType) else c for c in code.co_consts)
        return code.replace(co_filename=path, co_consts=constants)

    for function in functions:
        function.__code__ = hidden(function.__code__)


def install(torch_c: Any) -> None:
    """Sets the attributes of ``torch._C`` that `torch.cuda` looks for when it is imported, and calls later."""
    library = load()
    device_type = 1  # c10::DeviceType::CUDA

    class StreamBase(torch_c.Stream):  # type: ignore[misc, name-defined]
        """Base of `torch.cuda.Stream`."""

        def __new__(cls, priority: int = 0, **stream: int) -> Self:
            if "stream_ptr" in stream:
                raise NotImplementedError("external streams are not simulated")
            if stream:
                return super().__new__(cls, **stream)
            return super().__new__(cls, torch_c.device("cuda", 0), priority=priority)

        @property
        def cuda_stream(self) -> int:
            return int(self.stream_id)

        @property
        def priority(self) -> int:
            return -1 if self.stream_id > 32 else 0

    class EventBase(torch_c.Event):  # type: ignore[misc, name-defined]
        """Base of `torch.cuda.Event`."""

        def __new__(
            cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
        ) -> Self:
            if interprocess or external:
                raise NotImplementedError("interprocess and external events are not simulated")
            return super().__new__(cls, torch_c.device("cuda", 0), enable_timing=enable_timing)

        def elapsed_time(self, end_event: Any) -> float:  # torch.Event's own takes no subclass
            milliseconds = ctypes.c_double()
            call("event_elapsed", self.event_id, end_event.event_id, milliseconds)
            return milliseconds.value

        @property
        def cuda_event(self) -> int:
            return int(self.event_id)

    def init() -> None:
        import torch  # noqa: PLC0415 - is being imported

        call("context_init")
        library.generator_expose_default()
        torch.cuda.default_generators = (torch.Generator("cuda"),)
        torch.cuda._get_device_properties = lambda index: properties
        torch.UntypedStorage.clone = clone_storage
        importlib.import_module("simulated_cuda.collectives").install()  # imports torch, which is there now

    properties = SimpleNamespace(
        name=NAME, major=9, minor=0, total_memory=_TOTAL_BYTES, multi_processor_count=100, warp_size=32,
        is_integrated=0, is_multi_gpu_board=0, L2_cache_size=2**25, uuid=uuid.UUID(int=0),
    )  # fmt: skip

    attributes: dict[str, Any] = {
        "_has_cuda": True,
        "_cudart": Cudart("_cudart"),
        "_CudaStreamBase": StreamBase,
        "_CudaEventBase": EventBase,
        "_CUDAGraph": CUDAGraph,
        "_CudaDeviceProperties": SimpleNamespace,
        "_cuda_CUDAAllocator": type("_cuda_CUDAAllocator", (), {}),
        "_MemPool": type("_MemPool", (), {}),
        "_cuda_CUDAAllocator_AllocatorState": type("_cuda_CUDAAllocator_AllocatorState", (), {}),
        "_set_cached_tensors_enabled": lambda enabled: None,
        "_cuda_init": init,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_getDeviceCount": lambda: 1,
        "_cuda_getDevice": lambda: 0,
        "_cuda_setDevice": lambda index: None,
        "_cuda_exchangeDevice": lambda index: 0,
        "_cuda_maybeExchangeDevice": lambda index: 0,
        "_cuda_getArchFlags": lambda: None,
        "_cuda_getCompiledVersion": lambda: 0,
        "_cuda_canDeviceAccessPeer": lambda one, other: False,
        "_cuda_getCurrentStream": lambda index: (library.get_stream(), 0, device_type),
        "_cuda_getCurrentRawStream": lambda index: library.get_stream(),
        "_cuda_getDefaultStream": lambda index: (0, 0, device_type),
        "_cuda_setStream": lambda stream_id, device_index, device_type: library.set_stream(stream_id),
        "_cuda_synchronize": lambda: call("synchronize_all"),
        "_cuda_sleep": lambda cycles: None,
        "_cuda_isCurrentStreamCapturing": lambda: bool(library.is_capturing()),
        "_cuda_clearCublasWorkspaces": lambda: call("workspaces_clear"),
        "_graph_pool_handle": new_pool,
        "_cuda_beginAllocateToPool": lambda index, pool: call("pool_begin_allocate", *pool),
        "_cuda_beginAllocateCurrentThreadToPool": None,
        "_cuda_endAllocateToPool": lambda index, pool: call("pool_end_allocate", *pool),
        "_cuda_releasePool": lambda index, pool: call("pool_release", *pool),
        "_cuda_emptyCache": lambda: call("cache_empty"),
        "_host_emptyCache": lambda: call("host_cache_empty"),
        "_cuda_memoryStats": memory_stats,
        "_cuda_resetPeakMemoryStats": lambda index: library.memory_reset_peaks(),
        "_cuda_resetAccumulatedMemoryStats": lambda index: None,
        "_cuda_memorySnapshot": memory_snapshot,
        "_cuda_record_memory_history": lambda *_: None,
        "_cuda_setMemoryFraction": lambda fraction, index: library.memory_set_total(int(fraction * _TOTAL_BYTES)),
        "_cuda_hostMemoryStats": lambda: {"allocated_bytes": {"current": library.host_num_pinned_bytes()}},
        "_cuda_resetPeakHostMemoryStats": lambda: None,
        "_cuda_getAllocatorBackend": lambda: "native",
    }
    for name, value in attributes.items():
        setattr(torch_c, name, value)


hide_frames(value for value in (install, call, *vars(CUDAGraph).values(), *vars(Cudart).values()) if isfunction(value))
