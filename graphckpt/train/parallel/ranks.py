"""The processes of a run: their launch, their devices, their process groups, and collectives of plain values."""

from __future__ import annotations

import os
import random
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from graphckpt.errors import ConfigError, GraphckptError, first_line
from graphckpt.train.settings import DistConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_LOCAL = (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
_LOST = ("connection closed", "connection reset", "broken pipe", "timed out", "timeout", "nccl", "gloo", "socket")
_TORCH = Path(torch.__file__).parent
_PATIENCE = timedelta(days=7)  # while one process prepares the data; if it dies, the others see that at once


@final
class ParallelError(GraphckptError, RuntimeError):
    """Another process of the run has exited, or does not answer."""


def is_connection_error(error: BaseException) -> bool:
    if not (dist.is_available() and dist.is_initialized() and isinstance(error, RuntimeError)):
        return False
    if isinstance(error, dist.DistError):
        return True
    # gloo raises a plain RuntimeError when a peer is lost. It is raised in PyTorch's code, and only its words tell it
    # from an error of the model. Code of the user may time out as well, and a DataLoader.
    frames = traceback.extract_tb(error.__traceback__)
    file = Path(frames[-1].filename if frames else "")
    is_of_torch = file.is_relative_to(_TORCH) and not file.is_relative_to(_TORCH / "utils" / "data")
    return is_of_torch and any(word in first_line(error).lower() for word in _LOST)


def resolve_device(name: str | None, config: DistConfig) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if config.num_processes > 1 and name.startswith("cuda"):
        local, local_size = (int(os.environ.get(key, default)) for key, default in _LOCAL)
        if name != "cuda":
            fix = "train.device=cuda, and each process takes one"
            raise ConfigError(f"train.device: {name!r} is one device for all processes · fix: {fix}")
        if (count := torch.cuda.device_count()) < local_size:
            fix = "start fewer, or set train.device=cpu"
            raise ConfigError(f"train.device: {local_size} processes and {count} CUDA devices here · fix: {fix}")
        torch.cuda.set_device(local)
        name = f"cuda:{local}"
    try:
        torch.empty(0, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts
        fix = "leave train.device out, and the device is picked"
        raise ConfigError(f"train.device: {name!r} cannot be used ({first_line(error)}) · fix: {fix}") from error


def check_world_size(config: DistConfig) -> None:
    wanted = config.num_processes
    value = os.environ.get("WORLD_SIZE", "1")
    started = int(value) if value.isdigit() else 1
    if dist.is_available() and dist.is_initialized():
        started = dist.get_world_size()
    if wanted > 1 and not dist.is_available():
        fix = "leave the section out, or use another build"
        raise ConfigError(f"train.dist: this PyTorch has no torch.distributed · fix: {fix}")
    if started == wanted:
        return
    launch = f"torchrun --nproc-per-node {wanted} -m graphckpt train ..."
    others = config.tensor_parallel_size * config.pipeline_parallel_size
    if started > 1 and started % others == 0:
        launch = f"train.dist.data_parallel_size={started // others}, or {launch}"
    processes = "1 process was" if started == 1 else f"{started} processes were"
    raise ConfigError(f"train.dist: {config.describe()} is {wanted}, and {processes} started · fix: {launch}")


@final
class TrainRanks:
    """The processes of a run, as seen from this one; a single one unless ``train.dist`` sets more."""

    def __init__(self, config: DistConfig, device: torch.device) -> None:
        self.size = config.num_processes
        self.rank = 0
        self.mesh: DeviceMesh | None = None
        """All processes, of dimensions ``"dp"`` and ``"tp"``, a pipeline's ``"pp"`` first; ``None`` if there is one."""
        self.config = config
        self.control: Any = None
        """A gloo group of all processes; ``None`` if there is one."""
        self._patient: Any = None
        self._background: Any = None
        self._is_owner = False
        if self.size > 1:
            self._join(device)

    @property
    def is_simulated(self) -> bool:
        """Whether this is a simulated rank of an absent cluster, whose tensors have no values."""
        return self.size > 1 and dist.get_backend() == "fake"

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        return self.stream % self.config.data_parallel_size

    @property
    def stage(self) -> int:
        return self.stream // self.config.data_parallel_size

    @property
    def stream(self) -> int:
        """The random stream of this process: tensor-parallel ranks share one, all others differ."""
        return self.rank // self.config.tensor_parallel_size

    @property
    def stage_mesh(self) -> DeviceMesh | None:
        return self.mesh["pp"] if self.mesh is not None and self.config.pipeline_parallel_size > 1 else None

    @property
    def tensor_mesh(self) -> DeviceMesh | None:
        return self.mesh["tp"] if self.mesh is not None and self.config.tensor_parallel_size > 1 else None

    @property
    def data_mesh(self) -> DeviceMesh | None:
        return self.mesh["dp"] if self.mesh is not None and self.config.data_parallel_size > 1 else None

    @property
    def everyone(self) -> Any:
        """The process group of all processes; ``None`` if there is one."""
        return None if self.size == 1 else dist.group.WORLD

    @property
    def stage_group(self) -> Any:
        """The process group of a pipeline stage, or ``False`` if the stage is one process."""
        return False if self.data_mesh is None else self.data_mesh.get_group()

    @property
    def background(self) -> Any:
        """As ``control``, for use during training; created on first access, which is collective."""
        if self._background is None and self.size > 1:
            timeout = timedelta(seconds=self.config.timeout_seconds)
            self._background = dist.new_group(backend="gloo", timeout=timeout)
        return self._background

    def describe(self, device: torch.device) -> str:
        if self.size == 1:
            return str(device)
        is_mixed = 1 < self.config.data_parallel_size < self.size or self.config.pipeline_parallel_size > 1
        return f"{self.size} processes on {device.type}" + (f" ({self.config.describe()})" if is_mixed else "")

    def _join(self, device: torch.device) -> None:
        from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415 - takes a second

        timeout = timedelta(seconds=self.config.timeout_seconds)
        if not dist.is_initialized():
            self._is_owner = True
            # Both backends: weights are reduced on the GPU, plain values and snapshots on the CPU.
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=timeout)
        self.rank = dist.get_rank()
        sizes = {"dp": self.config.data_parallel_size, "tp": self.config.tensor_parallel_size}
        if self.config.pipeline_parallel_size > 1:
            sizes = {"pp": self.config.pipeline_parallel_size, **sizes}
        ranks = torch.arange(self.size).view(*sizes.values())
        # With dp=2 and tp=2, ranks are [[0, 1], [2, 3]]: lines of dp are [0, 2] and [1, 3], of tp [0, 1] and [2, 3].
        # Every rank has to create all groups, in the same order, also those that it is not in.
        lines = [ranks.movedim(dim, -1).flatten(0, -2).tolist() for dim in range(ranks.ndim)]
        # `init_device_mesh` would create groups with PyTorch's default timeout, and not ours.
        groups = [dist.new_subgroups_by_enumeration(line, timeout=timeout)[0] for line in lines]
        self.mesh = DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=tuple(sizes))
        # gloo, so that plain values and flags neither wait for the GPU nor for NCCL's queue.
        self.control = dist.new_group(backend="gloo", timeout=timeout)
        self._patient = dist.new_group(backend="gloo", timeout=_PATIENCE)

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Runs the body on rank 0, then on the others, which find its files on the disk."""
        fault: str | None = None
        if self.is_main:
            try:
                yield
            except BaseException as error:
                fault = type(error).__name__
                raise
            finally:
                # Also after an error: the others would wait a week for it.
                self.broadcast(fault, self._patient)
            return
        if (fault := self.broadcast(None, self._patient)) is not None:
            raise ParallelError(f"rank {self.rank}: rank 0 ended with {fault} · fix: see its message")
        yield

    def run_on_main(self, action: Callable[[], None], error: type[GraphckptError]) -> None:
        """Calls ``action`` on rank 0; an ``error`` there is raised on all ranks."""
        fault: str | None = None
        if self.is_main:
            try:
                action()
            except error as raised:
                if self.size == 1:
                    raise
                fault = str(raised)
        if (fault := self.broadcast(fault)) is not None:
            raise error(fault)

    def broadcast(self, value: Any, group: Any = None) -> Any:
        """Returns rank 0's value, over ``control`` by default."""
        if self.size == 1:
            return value
        box = [value]
        with self.translate_errors():
            dist.broadcast_object_list(box, src=0, group=group or self.control)
        return box[0]

    def any(self, flag: bool) -> bool:
        """Returns whether the flag is set on any rank; collective."""
        if self.size == 1:
            return flag
        flags = torch.tensor([flag], dtype=torch.int32)
        with self.translate_errors():
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.control)
        return bool(flags.item())

    def all_gather(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        box: list[Any] = [None] * self.size
        with self.translate_errors():
            dist.all_gather_object(box, value, group=self.control)
        return box

    def gather_tensors(self, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gathers tensors on rank 0, on the CPU; of several with one name, that of the lowest rank. Others get nothing.

        ``like`` has a tensor of the same shape and dtype for each possible name, in the same order on all ranks.
        """
        owners = [set(names) for names in self.all_gather(list(tensors))]
        gathered: dict[str, Tensor] = {}
        for name, shape in like.items():
            owner = next((rank for rank, names in enumerate(owners) if name in names), None)
            with self.translate_errors():
                if self.rank == owner:
                    tensor = tensors[name].detach().cpu().contiguous()
                    if self.is_main:
                        gathered[name] = tensor
                    else:
                        dist.send(tensor, 0, group=self.control)
                elif owner is not None and self.is_main:
                    gathered[name] = torch.empty(shape.shape, dtype=shape.dtype)
                    dist.recv(gathered[name], owner, group=self.control)
        return gathered

    def local_samples(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the samples of this data-parallel rank: equal parts, in the order of one process."""
        size = len(indices) // self.config.data_parallel_size
        return indices[self.data_rank * size : (self.data_rank + 1) * size]

    def average(self, losses: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All-reduces scalars to their means over the data-parallel ranks."""
        mesh = self.data_mesh
        if mesh is None:
            return dict(losses)
        stacked = torch.stack([loss.detach().float() for loss in losses.values()])
        with self.translate_errors():
            dist.all_reduce(stacked, group=mesh.get_group())
        return dict(zip(losses, (stacked / mesh.size()).unbind(), strict=True))

    def sum(self, totals: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sums float64 tensors on the CPU over the data-parallel ranks; the same result on all.

        In a pipeline, they come from the last stage.
        """
        if self.data_mesh is None and self.stage_mesh is None:
            return totals
        rows = self.all_gather({name: total.tolist() for name, total in totals.items()})
        # With pp=2, dp=2: ranks 2 and 3 are the last stage. Of ranks that share a batch, one counts.
        num_ranks = self.config.data_parallel_size * self.config.tensor_parallel_size
        rows_of_ranks = rows[-num_ranks :: self.config.tensor_parallel_size]
        return {
            name: torch.tensor([row[name] for row in rows_of_ranks], dtype=torch.float64).sum(0)
            for name in rows_of_ranks[0]
        }

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Turns the error of a backend about a lost connection into one that says what to do."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, GraphckptError) or not is_connection_error(error):
                raise
            raise ParallelError(
                f"rank {self.rank}: another process is gone, or has not answered for {self.config.timeout_seconds} s "
                f"({first_line(error)}) · fix: see the errors of the other processes, and use --resume; "
                "if one is slow, raise train.dist.timeout_seconds"
            ) from error

    def close(self) -> None:
        """Waits for all ranks and destroys the process group; call it last, and not after an error."""
        if self.size == 1 or not self._is_owner or not dist.is_initialized():
            return
        # A rank that leaves while others still communicate ends them by a lost connection. After an error a rank may be
        # missing, and the barrier would wait for its timeout.
        dist.barrier(group=self.control)
        dist.destroy_process_group()


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - what a user's data code may draw from
    random.seed(seed)


def seed_per_rank(seed: int, stream: int, done: int = 0) -> None:
    """Seeds ranks with different samples or layers differently; stream 0 draws the numbers of a single process."""
    # Mixed by SeedSequence: with `seed + stream`, rank 1 of seed 1 would draw what rank 0 of seed 2 does. PyTorch's
    # generators take 63 bits on all devices.
    if stream:
        entropy = np.random.SeedSequence((seed, stream, done))
        seed_all(int(entropy.generate_state(1, np.uint64)[0]) >> 1)
