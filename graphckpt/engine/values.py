"""The value check: compares the tensors that a recomputation saves with sketches of those of the original forward.

A sketch is ``tensor.view(-1, 1024) @ weights``, with fixed pseudo-random weights: a thousandth of a large tensor. The
relative difference of two sketches, in the 2-norm, estimates that of the tensors, whatever the pattern of the
difference: a sum and a sum of squares, say, would be blind to tokens that trade places.

::

    original forward    autograd saves x, y      sketches of x and y are kept
    recomputation       computes x, y anew       they are sketched as well, and the pairs are compared

On a CPU a difference is an error in that backward. A CUDA device must not be waited for: the result of the comparison
is copied to the host, and read in a later forward.
"""

from __future__ import annotations

import atexit
import mmap
import os
import sys
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch

from graphckpt._compat import (
    at_end_of_backward,
    autograd_sequence_number,
    has_own_dispatch,
    local_shard,
    norms_of,
    what_is_not_plain,
)
from graphckpt._compat_compiler import never_compiled, unobserved
from graphckpt.engine import mismatch
from graphckpt.engine.sampling import forced_check
from graphckpt.errors import warn

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphckpt.engine.block import BlockContext


def begin_check(
    block: BlockContext, determinism_check: str, *, is_learning: bool, is_nested: bool
) -> ValueCheck | None:
    """Begins the check of a call; returns ``None`` if this call is not checked.

    A call ``is_nested`` in a recomputation of a block around it: that one compares its arguments, and nothing
    recomputes the call itself.
    """
    # Reports of earlier backwards. A forward may read them: it comes late enough for most of them to be complete.
    if reports:  # without waiting for the devices
        report_differences(waits=False)
    if determinism_check == "none" or is_nested:
        return None
    if determinism_check == "default" and not block.sampler.is_due(is_learning=is_learning):
        return None
    if _is_capturing():  # what the host decides in a capture is decided for all replays
        if determinism_check == "values":
            block.note("determinism_check='values' has no effect in replays of a CUDA graph; warm-up steps are checked")
        return None
    return ValueCheck(block, waits=determinism_check == "values")


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


# Sketches


_ROW = 1024  # numbers of the tensor for one of the sketch
_LEAST = 8  # numbers of a sketch; fewer estimate a norm badly
_PIECE = 64 * _ROW  # the least that is copied at a time where a tensor cannot be read as it is
_MAX_PIECES = 2048  # for one byte an element: a piece takes up to 20 bytes an element, so below 1 % of the tensor

# A hash of the bytes would find each difference, also those that are none of the program's: a kernel on CUDA that adds
# by atomic operations sums in another order each time. Sketches measure how large the difference is.
_TOLERANCES = {
    torch.float64: 1e-6,
    torch.float32: 1e-4,
    torch.float16: 4e-3,
    torch.bfloat16: 2e-2,
    torch.complex128: 1e-6,
    torch.complex64: 1e-4,
}
"""Relative, at least four times what one product of 768 numbers differs by if it is summed in another order."""
_FLOAT8_TOLERANCE = 0.1  # rounding to 3 bits: a last bit of float32 flips a few values by 1/8


_CARRIERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by size, as which numbers of types that few ops know are gathered."""


def tolerance_of(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return _TOLERANCES.get(dtype, _FLOAT8_TOLERANCE)
    return 0.0


class _Reading(NamedTuple):
    """How a tensor is read. The original one decides, so that both are read in the same order."""

    order: tuple[int, ...] | None
    """Of the dimensions, by decreasing stride; ``None`` if the tensor is contiguous."""
    repeated: tuple[int, ...]
    """Dimensions of stride 0, of which one element is read."""
    is_conjugate: bool
    piece: int
    """The number of elements to read at a time; 0 is all of them, without a copy."""


_AS_IT_IS = _Reading(None, (), False, 0)
_FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


class Sketch(NamedTuple):
    reading: _Reading
    """How the tensor was read. A tensor with which it is compared is read in the same way."""
    values: torch.Tensor


def sketch_of(tensor: torch.Tensor, reading: _Reading | None = None) -> Sketch | None:
    """Returns the sketch of a tensor, read by ``reading`` if that is given; ``None`` if its values cannot be read.

    It is called :func:`unobserved`. No temporary takes more than 1 % of a large tensor.
    """
    if has_own_dispatch(tensor):
        shard = local_shard(tensor)
        if shard is None or has_own_dispatch(shard):
            return None
        tensor = shard
    if not _has_values(tensor):
        return None
    if reading in (None, _AS_IT_IS) and tensor.is_contiguous() and tensor.dtype in _FLOATS:  # nearly all of them
        return Sketch(_AS_IT_IS, _project_flat(tensor))
    reading = reading or _reading_of(tensor)
    if tensor.is_conj() is not reading.is_conjugate:
        return None
    if tensor.is_complex():
        plain = torch.view_as_real(tensor.conj() if reading.is_conjugate else tensor)
        reading_of_parts = reading._replace(order=reading.order and (*reading.order, tensor.dim()))
        values = _project(plain, reading_of_parts)
    else:
        values = _project(tensor, reading)
    return None if values is None else Sketch(reading, values)


def _has_values(tensor: torch.Tensor) -> bool:
    if what_is_not_plain(tensor) is not None or tensor.is_meta or tensor.is_neg() or not tensor.numel():
        return False
    if tensor.dtype is torch.uint8:  # a kernel's workspace, of which it may leave parts unwritten: oneDNN's for LSTM
        return False
    if not tensor.untyped_storage().nbytes():  # FSDP has freed it
        return False
    return not (tensor.is_cuda and _refuses_products())


def _refuses_products() -> bool:
    """Whether cuBLAS raises an error for want of a deterministic workspace: a model without products needs none."""
    # https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html
    is_strict = (
        torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    return is_strict and "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def _reading_of(tensor: torch.Tensor) -> _Reading:
    shape, strides = tensor.shape, tensor.stride()
    is_contiguous = tensor.is_contiguous()
    repeated = () if is_contiguous else tuple([d for d, s in enumerate(strides) if s == 0 and shape[d] > 1])
    order = None
    if not is_contiguous:
        order = tuple(sorted(range(len(shape)), key=lambda dim: (-strides[dim], dim)))
    reading = _Reading(order, repeated, tensor.is_conj(), 0)
    read = _in_order(tensor, reading)
    if read.is_contiguous() and read.dtype in _TOLERANCES:
        return reading
    rows = read.numel() * read.dtype.itemsize // (_MAX_PIECES * _ROW)
    return reading._replace(piece=max(_PIECE, rows * _ROW))


def _in_order(tensor: torch.Tensor, reading: _Reading) -> torch.Tensor:
    for dim in reading.repeated:
        tensor = tensor.narrow(dim, 0, 1)
    return tensor if reading.order is None else tensor.permute(reading.order)


def _project(tensor: torch.Tensor, reading: _Reading) -> torch.Tensor | None:
    tensor = _in_order(tensor, reading)
    is_contiguous = tensor.is_contiguous()
    if not reading.piece:
        return _project_flat(tensor.view(-1)) if is_contiguous else None
    dtype = _dtype_of_products(tensor)
    carrier = _CARRIERS.get(tensor.dtype.itemsize, tensor.dtype) if dtype is not tensor.dtype else dtype
    parts = []
    for start in range(0, tensor.numel(), reading.piece):
        end = min(start + reading.piece, tensor.numel())
        if is_contiguous:
            piece = tensor.view(-1)[start:end]
        else:
            index = torch.arange(start, end, device=tensor.device)
            piece = torch.take(tensor.view(carrier), index).view(tensor.dtype)
        parts.append(_project_flat(piece.to(dtype)))
    return torch.cat(parts)


def _dtype_of_products(tensor: torch.Tensor) -> torch.dtype:
    """Integers of up to 32 bits are summed exactly: all weights are small integers, divided by a power of two."""
    if tensor.dtype in _TOLERANCES:
        return tensor.dtype
    is_small = tensor.dtype.itemsize == 1 or tensor.is_floating_point() or tensor.device.type == "mps"
    return torch.float32 if is_small else torch.float64


def _project_flat(flat: torch.Tensor) -> torch.Tensor:
    """Returns the products of a contiguous tensor, of any shape."""
    num = flat.numel()
    if num < _LEAST:
        return flat.view(-1) * _weights(0, num, flat.dtype, flat.device)
    row = min(_ROW, num // _LEAST)
    rows, rest = divmod(num, row)
    weights = _weights(0, row, flat.dtype, flat.device)
    if not rest:
        return torch.mv(flat.view(rows, row), weights)
    flat = flat.view(-1)
    values = torch.mv(flat[:-rest].view(rows, row), weights)
    # The rest has other weights: with those of a row, values that trade places with the first row would not show.
    values[0].add_(torch.dot(flat[-rest:], _weights(row, row + rest, flat.dtype, flat.device)))
    return values


@lru_cache(4 * _ROW)
def _weights(first: int, end: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return _all_weights(dtype, device)[first:end]


@lru_cache
def _all_weights(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns the weights of a row, then of what is left over: about 1/32, so that no sum of float16 overflows.

    A program's generator must not be drawn from. The copy to a device waits for it, once in a process: other streams
    will read it.
    """
    generator = torch.Generator().manual_seed(1)
    signs = torch.randint(0, 2, (2 * _ROW,), generator=generator) * 2 - 1
    sizes = torch.randint(16, 32, (2 * _ROW,), generator=generator)  # exact in bfloat16
    return (signs * sizes / 512).to(device, dtype)


def relative_differences(pairs: Sequence[_Pair]) -> torch.Tensor:
    """Returns the relative difference of each pair of sketches, 0 to ``inf``, in a few kernels for all of them."""
    wide = torch.float32 if pairs[0].original.device.type == "mps" else torch.float64
    lengths = [pair.original.numel() for pair in pairs]
    one = torch.cat([pair.original for pair in pairs]).to(wide)
    other = torch.cat([pair.recomputed for pair in pairs]).to(wide)
    # Equal infinities and NaNs differ by 0, not by NaN. Against a number they differ by infinity, whatever the norm.
    is_same = (one == other) | (one.isnan() & other.isnan())
    gaps = norms_of(torch.where(is_same, 0.0, one - other).split(lengths))
    largest = torch.maximum(one.abs(), other.abs())
    sizes = norms_of(torch.where(largest.isfinite(), largest, 0.0).split(lengths))
    return torch.where(gaps == 0, 0.0, (gaps / sizes).nan_to_num(nan=inf, posinf=inf))


# The check of one call

# Note [Sketches outside of the heap]
#
# Sketches live from the forward to the backward, while large tensors come and go. In the heap of the C library they lie
# between those, whose memory then cannot be joined to larger pieces again. Of a GPT-2 with 6 layers and 4 x 512 tokens
# the resident set grew from 3.2 to 3.65 GiB by 10 MB of sketches, where the live tensors took the same (glibc 2.36).
# On CUDA the allocator has separate blocks for small tensors.

_PAGES_BYTES = 2**20  # address space: the system gives only what is written
_PRIVATE = {"flags": mmap.MAP_PRIVATE} if hasattr(mmap, "MAP_PRIVATE") else {}  # on Windows it always is
_ALIGNMENT = 64  # bytes, as PyTorch's CPU allocator aligns


@final
class _Pages:
    """Memory for the sketches of one call on a CPU: see Note [Sketches outside of the heap]."""

    __slots__ = ("_free",)

    def __init__(self) -> None:
        self._free: torch.Tensor | None = None

    def copy_of(self, values: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a flat tensor in these pages; a tensor on another device is returned as it is.

        It is called :func:`unobserved`.
        """
        if values.device.type != "cpu":
            return values
        num_bytes = values.nbytes
        occupied = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if self._free is None or occupied > self._free.numel():
            pages = mmap.mmap(-1, max(occupied, _PAGES_BYTES), **_PRIVATE)
            self._free = torch.frombuffer(pages, dtype=torch.uint8)  # which unmaps them with its last view
        copy = self._free[:num_bytes].view(values.dtype)
        self._free = self._free[occupied:]
        return copy.copy_(values)


_RRELU = torch.nn.functional.rrelu.__code__


@final
class ValueCheck:
    """The sketches of one call's saved tensors.

    Args:
        block: The block of the call.
        waits: Whether a CUDA device is waited for at the end of backward.
    """

    __slots__ = (
        "_num_bytes", "_number", "_pages", "_unsettled", "block", "forced", "later", "lines", "sketches", "waits",
    )  # fmt: skip

    def __init__(self, block: BlockContext, *, waits: bool) -> None:
        self.block = block
        self.waits = waits
        self.forced = forced_check.get()
        self.sketches: list[Sketch | None] = []
        self.later: dict[int, torch.Tensor] = {}
        """The values of other sketches, for CUDA: taken once the op that saves a tensor is over."""
        self.lines: dict[int, str] = {}
        """Of the code that saves tensors on a CUDA device, whose report comes when the recomputation is over."""
        self._pages = _Pages()
        self._num_bytes = 0  # of the sketches
        self._number = 0  # of the op that has saved what is unsettled
        self._unsettled: list[tuple[int, torch.Tensor]] = []

    def see(self, tensor: torch.Tensor) -> None:
        """Sketches a tensor that the original forward saves."""
        # Another number than before: the op that saved the unsettled tensors is over, and they have their last values.
        number, position = autograd_sequence_number(), len(self.sketches)
        if self._unsettled and number != self._number:
            self._settle()
        may_move = not tensor.requires_grad and tensor.is_floating_point()
        # `rrelu` saves its noise, which it leaves uninitialized in evaluation (pytorch#188260).
        is_noise = may_move and mismatch.calling_code(sys._getframe()) is _RRELU
        sketch = None if is_noise else sketch_of(tensor)
        if sketch is not None:
            sketch = sketch._replace(values=self._pages.copy_of(sketch.values))
        self.sketches.append(sketch)
        if tensor.is_cuda:
            self.lines[position] = mismatch.calling_line(sys._getframe())
        if may_move and sketch is not None:
            self._number = number
            self._unsettled.append((position, tensor))

    def _settle(self) -> None:
        """Leaves out what the op before has modified after it has saved it, which no version shows.

        Backward does not read it as it was saved. These are statistics of batch norms, of which a recomputation may
        leave updates out.
        """
        for position, tensor in self._unsettled:
            sketch = self.sketches[position]
            later = None if sketch is None else sketch_of(tensor, sketch.reading)
            if sketch is None or later is None:
                self.sketches[position] = None
            elif tensor.is_cuda:  # which is not to be waited for
                self.later[position] = later.values
            elif not torch.equal(sketch.values, later.values):
                self.sketches[position] = None
        self._unsettled.clear()

    def end_forward(self) -> None:
        with unobserved():
            self._settle()
            self._num_bytes = sum(sketch.values.nbytes for sketch in self.sketches if sketch is not None)
        self.block.sampler.count_bytes(self._num_bytes)

    # With the graph, whose frame holds this: each call that waits for its backward has its sketches.
    def __del__(self) -> None:
        self.block.sampler.count_bytes(-self._num_bytes)


def seen_before(pack: Callable[[torch.Tensor], Any], see: Callable[[torch.Tensor], object]) -> Callable[..., Any]:
    """Returns the hook ``pack``, before which ``see`` gets each tensor: ``pack`` may end a recomputation."""

    @never_compiled
    def see_and_pack(tensor: torch.Tensor) -> Any:
        with unobserved():
            see(tensor)
        return pack(tensor)

    return see_and_pack


class _Pair(NamedTuple):
    position: int
    kind: tuple[torch.dtype, torch.Size]
    original: torch.Tensor
    recomputed: torch.Tensor


def begin_comparison(check: ValueCheck, holders: Sequence[weakref.ref[Any]]) -> Comparison | None:
    """Begins to compare a recomputation; ``None`` if backward alone is captured."""
    return None if _is_capturing() else Comparison(check, holders)


@final
class Comparison:
    """Compares the tensors of one recomputation with the sketches of the original forward."""

    __slots__ = ("_check", "_fault", "_holders", "_on_device", "_positions")

    def __init__(self, check: ValueCheck, holders: Sequence[weakref.ref[Any]]) -> None:
        self._check = check
        self._positions = count()
        self._holders = holders
        self._on_device: list[_Pair] = []
        self._fault: mismatch.Fault | None = None

    def see(self, tensor: torch.Tensor) -> None:
        """Compares a tensor that the recomputation saves."""
        position, sketches = next(self._positions), self._check.sketches
        original = sketches[position] if position < len(sketches) else None
        holder = None if original is None else self._holders[position]()
        if original is None or holder is None or (holder.dtype, holder.shape) != (tensor.dtype, tensor.shape):
            return  # it is not compared, backward cannot ask for it, or there is another error
        self._compare(position, original, tensor)

    def _compare(self, position: int, original: Sketch, tensor: torch.Tensor) -> None:
        if self._fault is not None:
            return
        sketch = sketch_of(tensor, original.reading)
        if sketch is None or sketch.values.shape != original.values.shape:
            return
        is_cuda = tensor.is_cuda
        if not is_cuda and torch.equal(sketch.values, original.values):
            return
        pair = _Pair(position, (tensor.dtype, tensor.shape), original.values, sketch.values)
        if is_cuda:
            self._on_device.append(pair)
            return
        difference = relative_differences([pair]).item()
        if difference > tolerance_of(tensor.dtype):
            self._fault = mismatch.Fault(position, pair.kind, pair.kind, difference=difference)

    def end(self) -> mismatch.Fault | None:
        """Returns the first difference on a device that need not be waited for; those of CUDA are read later."""
        with unobserved():
            by_device: dict[torch.device, list[_Pair]] = {}
            for pair in self._on_device:
                by_device.setdefault(pair.recomputed.device, []).append(pair)
            reports = [_Report(self._check, pairs) for pairs in by_device.values()]
        for report in reports:
            _post(report, waits=self._check.waits)
        return self._fault


# Reports of CUDA devices


@final
class _Report:
    """The differences of one recomputation on their way from the device."""

    def __init__(self, check: ValueCheck, pairs: Sequence[_Pair]) -> None:
        self._block = check.block
        self._forced = check.forced
        self._faults = [
            mismatch.Fault(pair.position, pair.kind, pair.kind, line=check.lines.get(pair.position, ""))
            for pair in pairs
        ]
        differences = relative_differences(pairs)
        if check.later:  # the op has modified the tensor after saving it: its two sketches differ, and nothing is told
            settled = [pair._replace(recomputed=check.later.get(pair.position, pair.original)) for pair in pairs]
            differences = torch.where(relative_differences(settled) == 0, differences, 0.0)
        # From pageable memory the host would wait for the copy. Until the event is over, the numbers are undefined.
        self._on_host = torch.empty(len(pairs), dtype=differences.dtype, pin_memory=True)
        self._on_host.copy_(differences, non_blocking=True)
        self.is_copied = torch.cuda.Event()
        self.is_copied.record(torch.cuda.current_stream(differences.device))

    def read(self) -> None:
        """Logs a warning, once for each block: how much kernels on CUDA differ by themselves was not measured yet."""
        sampler = self._block.sampler
        for fault, difference in zip(self._faults, self._on_host.tolist(), strict=True):
            assert not isinstance(fault.first, int)
            if difference <= tolerance_of(fault.first[0]):
                continue
            measured = replace(fault, difference=difference)
            if self._forced is not None:  # the one who has forced the check tells it
                self._forced.differences.append(mismatch.values_differ(self._block.title, measured))
            elif not sampler.has_warned:
                sampler.has_warned = True
                self._block.note("the value check has found a difference, which the log describes")
                warn(mismatch.values_differ(self._block.title, measured, is_late=True))


reports: deque[_Report] = deque()
"""Of all threads: backward posts them from the threads of the autograd engine."""


def _post(report: _Report, *, waits: bool) -> None:
    # Registered anew, as `atexit` goes backwards: the reports are read before earlier handlers shut anything down.
    if not reports:
        atexit.unregister(report_differences)
        atexit.register(report_differences)
    reports.append(report)
    if waits:
        at_end_of_backward(report_differences)


def report_differences(*, waits: bool = True) -> None:
    """Reads all differences, and ``waits`` for the devices to copy them; without, those that are copied by now."""
    # A capture forbids queries of events: https://docs.nvidia.com/dl-cuda-graph/torch-cuda-graph/quick-checklist.html
    while reports and not _is_capturing():
        try:
            report = reports.popleft()
        except IndexError:  # asked for afterwards: forwards in other threads read them too
            return
        if waits:
            report.is_copied.synchronize()
        elif not report.is_copied.query():
            reports.appendleft(report)
            return
        report.read()
