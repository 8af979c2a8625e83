"""Captures a step on a device: the interface of back ends, CUDA graphs, and the inputs that replays read."""

from __future__ import annotations

import gc
import traceback
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from graphckpt._compat import abandon_capture, assert_on_device, clear_cublas_workspaces
from graphckpt.errors import ConfigError, GraphckptError, GraphError
from graphckpt.simulation.stand_ins import PACKED, PADDED, swapped_masks
from graphckpt.stores.pinned import streams_of
from graphckpt.thread_state import RNGState, get_rng_state, set_rng_state
from graphckpt.training_state import ModuleTree, TrainingState
from graphckpt.tree import ATOMS, CallShape, tensors_in
from graphckpt.undo import Undo, enter, scope

CHOICES = ("auto", "cuda_graph", "eager")
"""The values of ``config.capture``."""

_FIX = "fix: pass tensors without gradient, numbers and strings"


class Capture(ABC):
    """The captured device work of one step, and its output: tensors that each replay overwrites."""

    output: Any

    @abstractmethod
    def replay(self) -> None:
        """Runs the work again, on the current stream, at the same addresses. No Python of the step runs."""

    @abstractmethod
    def release(self) -> None:
        """Releases the memory of the capture."""


class CaptureBackend(ABC):
    """Captures steps on one kind of device."""

    name: str
    """The word for ``config.capture`` and in messages."""
    device: torch.device | None = None
    """The device of the captured work. Tensors elsewhere are read once, at capture; ``None``: there are none."""

    @abstractmethod
    def warmup(self) -> AbstractContextManager[None]:
        """Returns a context for the eager steps before a capture, such as the stream of the capture."""

    @abstractmethod
    def capture(self, step: Callable[[], Any]) -> Capture:
        """Captures ``step``. It changes nothing on the device: the first replay runs the work.

        Raises:
            Exception: Any error of ``step``, or of the device for work that cannot be captured. Nothing is left behind.
        """

    @abstractmethod
    def pass_on(self, output: Any) -> None:
        """Prepares the output of a warm-up call for use outside of :meth:`warmup`."""

    def pool_bytes(self) -> int | None:
        """Returns the bytes that captures hold on the device, or ``None`` if they have no separate memory."""
        return None


def backend_for(capture: Any, devices: Sequence[torch.device]) -> CaptureBackend | None:
    """Returns the backend that ``config.capture`` means for modules on ``devices``; ``None`` runs steps eagerly."""
    if isinstance(capture, CaptureBackend):
        return capture
    if capture == "eager":
        return None
    if len(devices) == 1 and devices[0].type == "cuda":
        return CudaGraphBackend(devices[0])
    if capture == "cuda_graph":
        raise ConfigError(
            "Graph.config.capture: 'cuda_graph' expected modules on one CUDA device, got "
            f"{', '.join(str(device) for device in devices) or 'none'} · fix: move them, or use 'auto'"
        )
    return None


# Note [A pool lives as long as a graph in it]
# Graphs share a memory pool by its handle. Once the last of them is freed, the allocator destroys the pool and refuses
# to capture into it. So a capture that finds no other one alive starts a new pool. So does one after a failed capture:
# up to torch 2.12 the allocator of pinned memory treats the failed one as pending for good, and refuses its pool
# ("already recording to mempool_id").

# Note [Every capture has separate cuBLAS workspaces]
# cuBLAS keeps a workspace for each thread and stream, and a captured graph contains its address. Captures share one
# stream, so they would share the workspace too; from torch 2.12 on, `CUDAGraph.reset()` frees it under the others
# (pytorch#193402). So workspaces are freed before a capture and after it, as in torch/_inductor/cudagraph_trees.py:
# those that a capture uses are allocated within it, and their memory belongs to its pool.


@final
class CudaGraphBackend(CaptureBackend):
    """One CUDA graph per capture; they share a memory pool."""

    name = "cuda_graph"
    device: torch.device

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream, *self._copy_streams, _ = streams_of(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._captures: weakref.WeakSet[_CapturedCudaGraph] = weakref.WeakSet()

    @contextmanager
    def warmup(self) -> Iterator[None]:
        """Runs on the stream of the capture: autograd nodes remember the stream they were created on."""
        # Backward runs each node on that stream. A node that outlives its step, as those that accumulate gradients do
        # while something refers to them, would otherwise lead the capture to a stream that is not captured.
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        # Its products make workspaces for this stream. Those of eager steps would stay beside them, and exceed a plan's
        # budget: on an H200 two of 32 MiB each.
        clear_cublas_workspaces()
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def pass_on(self, output: Any) -> None:
        """Lets tensors from the stream of the capture be used on the current one: once freed, they wait for that."""
        current = torch.cuda.current_stream(self.device)
        for tensor in tensors_in(output):
            if tensor.is_cuda:
                tensor.record_stream(current)

    def pool_bytes(self) -> int:
        pools = {tuple(capture.pool) for capture in self._captures if capture.is_alive}
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s.get("segment_pool_id", ())) in pools)

    def capture(self, step: Callable[[], Any]) -> Capture:
        if torch.cuda.is_current_stream_capturing():
            raise GraphError("it is called inside another capture · fix: config.capture = 'eager'")
        if not any(capture.is_alive for capture in self._captures):
            self._pool = torch.cuda.graph_pool_handle()  # see Note [A pool lives as long as a graph in it]
        graph = torch.cuda.CUDAGraph()
        host_random = get_rng_state((), host=True)
        gc.collect()  # memory freed during a capture may belong to another one
        was_collecting = gc.isenabled()
        try:
            gc.disable()  # see Note [Nothing is unpinned in a capture] in stores/pinned.py
            torch.cuda.synchronize(self.device)  # raises what an earlier kernel has failed with
            clear_cublas_workspaces()  # see Note [Every capture has separate cuBLAS workspaces]
            torch.cuda.empty_cache()  # the capture has its own pool; cached memory of earlier steps is released for it
            torch.clear_autocast_cache()  # weights cast outside of the capture would not be cast in it
            output = self._run_capture(graph, step)
            check_not_drawn(host_random)
        except BaseException:
            graph.reset()
            self._pool = torch.cuda.graph_pool_handle()  # see Note [A pool lives as long as a graph in it]
            set_rng_state(host_random)
            raise
        finally:
            torch.clear_autocast_cache()
            if was_collecting:
                gc.enable()
        capture = _CapturedCudaGraph(graph, self._pool, output, self._stream)
        self._captures.add(capture)
        return capture

    def _run_capture(self, graph: torch.cuda.CUDAGraph, step: Callable[[], Any]) -> Any:
        # Not `torch.cuda.graph`: when a capture has failed, its exit raises again, which hides the first error and
        # leaves the thread on the stream of the capture.
        with _override_stale_capture_stream(), torch.cuda.stream(self._stream):
            has_begun = False
            try:
                # With "global", the default, what another thread does would make the capture fail: a data loader that
                # pins memory, a thread of a disk store.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                has_begun = True
                output = step()
                self._join_copies()
                graph.capture_end()
            except BaseException:
                abandon_capture(graph, self.device, self._pool, has_begun=has_begun)
                raise
            finally:
                clear_cublas_workspaces()  # see Note [Every capture has separate cuBLAS workspaces]
        return output

    def _join_copies(self) -> None:
        """Waits for copies of blocks outside of the loss: no backward does, and a capture must not end without."""
        for stream in self._copy_streams:
            with torch.cuda.stream(stream):
                is_captured = torch.cuda.is_current_stream_capturing()
            if is_captured:
                self._stream.wait_stream(stream)


@final
class _CapturedCudaGraph(Capture):
    def __init__(
        self, graph: torch.cuda.CUDAGraph, pool: tuple[int, int], output: Any, stream: torch.cuda.Stream
    ) -> None:
        self.output = output
        self.pool = pool
        self.is_alive = True
        self._graph = graph
        self._stream = stream

    def replay(self) -> None:
        self._graph.replay()
        # Gradients and optimizer states were allocated in the warm-up, on the stream of the capture. Once they are
        # freed, that stream reuses their memory at once, and must not overtake a replay on this one.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def release(self) -> None:
        self.output = None
        self.is_alive = False
        self._graph.reset()


def input_key(leaves: Sequence[Any], shape: CallShape, device: torch.device | None) -> tuple[Hashable, str | None]:
    """Returns the key of a capture: shapes, strides, dtypes and devices of tensors, and all other values.

    The second value is the reason if these arguments cannot be captured on ``device``.
    """
    key: list[Hashable] = [shape.num_args, shape.keywords, repr(shape.spec)]
    first_positions: dict[int, int] = {}
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            if leaf.requires_grad:
                return None, f"input {position} requires a gradient, which a replay would give to a copy of it · {_FIX}"
            if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided:
                return None, f"input {position} is a {type(leaf).__name__} of layout {leaf.layout} · {_FIX}"
            if device is not None and not is_on(leaf.device, device):  # its value would be baked in
                return None, f"input {position} is on {leaf.device} · fix: pass tensors on {device}"
            # A tensor that is passed twice has one static buffer, and two equal ones have two: another capture.
            first = first_positions.setdefault(id(leaf), position)
            key.append((first, leaf.shape, leaf.stride(), leaf.dtype, leaf.device))
        elif type(leaf) in ATOMS:
            key.append((type(leaf), leaf))
        else:
            return None, f"input {position} is a {type(leaf).__name__}, whose value may change unnoticed · {_FIX}"
    return tuple(key), None


def is_on(place: torch.device, device: torch.device) -> bool:
    """Whether a tensor on ``place`` is on ``device``, which is any of its type if it has no index."""
    return place.type == device.type and device.index in (None, place.index)


@final
class StaticInputs:
    """Buffers that hold the arguments of a captured step."""

    def __init__(self, leaves: Sequence[Any], shape: CallShape) -> None:
        buffers: dict[int, torch.Tensor] = {}
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor) or id(leaf) in buffers:
                continue
            if 0 in leaf.stride() and leaf.numel() > 1:  # expanded: its elements share memory
                buffers[id(leaf)] = leaf.detach().contiguous().clone()
            else:
                layout = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=leaf.device)
                buffers[id(leaf)] = layout.copy_(leaf)
        static = [buffers[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._buffers = [leaf if isinstance(leaf, torch.Tensor) else None for leaf in static]
        self.args, self.kwargs = shape.assemble(static)
        """The arguments of the captured step."""

    def load(self, leaves: Sequence[Any]) -> None:
        for buffer, leaf in zip(self._buffers, leaves, strict=True):
            if buffer is not None:
                buffer.copy_(leaf, non_blocking=True)


# Words in the device's messages, and what they mean for the step. The first match counts.
_FIXES = (
    (("pinned", "Cannot copy between CPU and CUDA"), "it copies between host and device", "pass tensors on the device"),
    (
        ("_local_scalar_dense", ".item", "nonzero", "data-dependent", "masked_select", "unique"),
        "it reads a device value on the host",
        "keep it on the device (torch.where for an if, fixed shapes for a mask), or read it after the call",
    ),
    (
        ("legacy stream", "uncaptured work"),
        "autograd waits for a stream from before the capture",
        "drop losses from before the Graph's first call; DistributedDataParallel needs torch 2.13 or newer",
    ),
    (
        ("not permitted when stream is capturing", "StreamCapture", "stream is capturing", "captures_underway"),
        "it waits for the device, or allocates memory that a graph cannot",
        "avoid .item(), .cpu(), synchronize(), event queries and indexing with lists",
    ),
    (("generator", "philox", "RNG"), "it uses its own random generator", "use the default generator"),
)
_OURS = Path(__file__).parents[1]
_TORCH = Path(torch.__file__).parent


@final
class ModuleAttributes:
    """Module attributes at the start of a capture. A step that sets others would do so once, not on every replay.

    The same holds for a step that modifies a tensor on another device than the ``device`` of the capture.
    """

    def __init__(self, roots: Sequence[tuple[str, nn.Module]], device: torch.device | None) -> None:
        self._paths = {module: path for path, module in modules_of(roots)}
        self._elsewhere = [
            (f"{path}.{key}", value, value._version)
            for module, path in self._paths.items()
            for key, value in {**module.__dict__, **module._parameters, **module._buffers}.items()
            if isinstance(value, torch.Tensor) and _is_elsewhere(value, device)
        ]
        tree = ModuleTree(module for _, module in roots)
        self._state = TrainingState([tensor for _, tensor, _ in self._elsewhere], tree=tree, has_random=False)

    def changed(self) -> str | None:
        for module, key in self._state.changed_attributes():
            return f"{self._paths[module]}.{key}"
        return next((name for name, tensor, version in self._elsewhere if tensor._version != version), None)

    def restore(self) -> None:
        self._state.restore()


def _is_elsewhere(tensor: torch.Tensor, device: torch.device | None) -> bool:
    return device is not None and tensor.device.type not in (device.type, "meta") and not tensor.is_inference()


def modules_of(roots: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Yields every module with its path, which begins with the name of its root."""
    for root, top in roots:
        for name, module in top.named_modules():
            yield f"{root}.{name}" if name else root, module


def capture_failure(error: BaseException, roots: Sequence[tuple[str, nn.Module]]) -> str:
    first_line = str(error).strip().split("\n", 1)[0]
    where = " · ".join(_places(error, roots))
    if isinstance(error, GraphckptError):
        return first_line
    for phrases, what, fix in _FIXES:
        if any(word in str(error) for word in phrases):
            return f"{where}: {what} ({type(error).__name__}: {first_line}) · fix: {fix}"
    return f"{where}: {type(error).__name__}: {first_line} · fix: config.capture = 'eager'"


def _places(error: BaseException, roots: Sequence[tuple[str, nn.Module]]) -> Iterator[str]:
    """Yields the innermost block and the innermost line of user code in the traceback."""
    names = {id(module): path for path, module in modules_of(roots)}
    block, line = None, None
    for frame, number in traceback.walk_tb(error.__traceback__):
        block = names.get(id(frame.f_locals.get("self")), block)
        path = Path(frame.f_code.co_filename)
        if frame.f_code.co_name in ("__torch_dispatch__", "__torch_function__"):
            break  # a mode's
        if not (path.is_relative_to(_OURS) or path.is_relative_to(_TORCH)):
            line = f"{path.name}:{number} in {frame.f_code.co_name}"
    yield from filter(None, (block, line)) if block or line else ["in backward or the optimizer"]


def check_not_drawn(host_random: RNGState) -> None:
    torch_state, _, host = host_random
    drawn = [] if torch.equal(torch.get_rng_state(), torch_state) else ["torch on the CPU"]
    drawn += host.changes() if host is not None else []
    if drawn:
        raise GraphError(
            f"the step draws random numbers with {' and '.join(drawn)}, which every replay would repeat · "
            "fix: draw them on the device, disable LayerDrop, or config.capture = 'eager'"
        )


# Note [Attention masks of a capture]
# Transformers' mask code checks whether a stream is being captured, because it must not read a tensor then: it makes a
# full mask where the eager step finds that none is needed, and a mask rules out the flash kernel.

_TRACING = "is_tracing"  # of a tensor: whether its values must not be read
_NOTE = (
    "Transformers makes the attention mask in every captured step, as it cannot check whether it is all ones "
    "(fix: pass no attention_mask for batches without padding)"
)


@final
class AttentionMasks:
    """Keeps Transformers' models on the attention kernel of the eager step; see Note [Attention masks of a capture]."""

    def __init__(self) -> None:
        self._is_packed: list[bool] = []
        self._skips_padding = False

    @property
    def note(self) -> str | None:
        return _NOTE if self._skips_padding else None

    @scope
    def observing(self, undo: Undo) -> Iterator[None]:

        def packed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            indices = original(*args, **kwargs)
            self._is_packed.append(indices is not None)
            return indices

        def padded(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            skips = original(*args, **kwargs)
            mask = args[0] if args else kwargs.get("padding_mask")
            self._skips_padding |= mask is not None and bool(skips)
            return skips

        enter(undo, swapped_masks(packed, PACKED))
        enter(undo, swapped_masks(padded, *PADDED))
        yield

    @scope
    def capturing(self, undo: Undo) -> Iterator[None]:
        """Repeats the decisions in the capture. If no step before had packed sequences, the device checks for them."""

        def packed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            indices = original(*args, **kwargs)
            if indices is not None:
                message = "position_ids contain packed sequences, unlike those of the steps before the capture"
                assert_on_device((indices[:, -1] == 0).all(), message)
            return None

        def tracing(original: Callable[..., Any], tensor: Any = None) -> Any:
            return tensor is not None and original(tensor)  # before Transformers 5.23 also for a missing mask

        finds_none = bool(self._is_packed) and not any(self._is_packed)
        enter(undo, swapped_masks(tracing, _TRACING))
        enter(undo, swapped_masks(packed, *[PACKED] if finds_none else []))
        yield


@scope
def _override_stale_capture_stream(undo: Undo) -> Iterator[None]:
    """Lets gradients of older steps be added on the stream that records, not on the one that they were made on.

    Public from torch 2.12 on; before, steps that run on the recording's stream from the start need it not.
    """
    switch = getattr(torch.autograd.graph, "set_override_stale_capture_stream", None)
    if switch is not None:
        undo.append((switch, (False,)))
        switch(True)
    yield
