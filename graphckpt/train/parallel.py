"""The processes of a run that share each matrix: they find each other, agree, and end together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import nn

from graphckpt.errors import ConfigError, GraphckptError
from graphckpt.train.reserved import DistConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_PATIENCE = timedelta(days=7)  # while one process prepares the data; if it dies, the others see that at once
_LOST = ("connection closed", "connection reset", "broken pipe", "timed out", "timeout", "nccl", "gloo", "socket")


@final
class ParallelError(GraphckptError, RuntimeError):
    """Another process of the run is gone, or does not answer."""


@final
class Ranks:
    """The processes of a run, of which this is one; alone unless ``train.dist`` says otherwise.

    Args:
        config: the section ``train.dist``.
        device: where this process trains.

    Raises:
        ConfigError: another number of processes was started than ``config`` says.
    """

    def __init__(self, config: DistConfig, device: torch.device) -> None:
        self.size = config.tensor_parallel_size
        self.rank = 0
        self.mesh: DeviceMesh | None = None
        """The processes that share each matrix; ``None`` if there is one."""
        self._config = config
        self._control: Any = None
        self._patient: Any = None
        self._is_owner = False
        _check_started(config.tensor_parallel_size)
        if self.size > 1:
            self._join(device)

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes files and prints."""
        return self.rank == 0

    def described(self, device: torch.device) -> str:
        """Returns where the run trains, as text."""
        return str(device) if self.size == 1 else f"{self.size} processes on {device.type}"

    def _join(self, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - takes a second

        timeout = timedelta(seconds=self._config.timeout_seconds)
        if not dist.is_initialized():
            self._is_owner = True
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=timeout)
        self.rank = dist.get_rank()
        self.mesh = init_device_mesh(device.type, (self.size,), mesh_dim_names=("tp",))
        self._control = dist.new_group(backend="gloo", timeout=timeout)
        self._patient = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def shard(self, model: nn.Module) -> nn.Module:
        """Cuts a model over the processes, if there are several.

        Raises:
            ConfigError: nobody knows how to cut it, or a size does not divide.
        """
        if self.mesh is None:
            return model
        from graphckpt.train.plans import shard_model  # noqa: PLC0415 - loads what one process does not need

        return shard_model(model, self.mesh)

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Runs what is inside on the main process, and then on the others, which find on the disk what it made.

        Raises:
            ParallelError: it failed there, which says why.
        """
        if self.is_main:
            fault: BaseException | None = None
            try:
                yield
            except BaseException as error:
                fault = error
                raise
            finally:
                if self.size > 1:
                    self._told(None if fault is None else type(fault).__name__, self._patient)
            return
        fault_name = self._told(None, self._patient)
        if fault_name is not None:
            raise ParallelError(f"rank {self.rank}: rank 0 ended with {fault_name} · fix: see its message")
        yield

    def main_does(self, action: Callable[[], None], error: type[GraphckptError]) -> None:
        """Calls ``action`` on the main process; an ``error`` there is raised on all: they stay alike."""
        fault: str | None = None
        if self.is_main:
            try:
                action()
            except error as raised:
                if self.size == 1:
                    raise
                fault = str(raised)
        if (fault := self.told(fault)) is not None:
            raise error(fault)

    def told(self, value: Any) -> Any:
        """Returns what the main process called this with, a plain value, on every process."""
        return value if self.size == 1 else self._told(value, self._control)

    def _told(self, value: Any, group: Any) -> Any:
        box = [value]
        with self.together():
            dist.broadcast_object_list(box, src=0, group=group)
        return box[0]

    def any(self, flag: bool) -> bool:
        """Returns whether the flag is set on any process; all have to call this."""
        if self.size == 1:
            return flag
        flags = torch.tensor([flag], dtype=torch.int32)
        with self.together():
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._control)
        return bool(flags.item())

    @contextmanager
    def together(self) -> Iterator[None]:
        """Says in the library's words that another process is gone or does not answer.

        Raises:
            ParallelError: that.
        """
        try:
            yield
        except RuntimeError as error:
            first_line = str(error).split("\n", 1)[0]
            is_lost = isinstance(error, dist.DistError) or any(word in first_line.lower() for word in _LOST)
            if self.size == 1 or isinstance(error, GraphckptError) or not is_lost:
                raise
            seconds = self._config.timeout_seconds
            what = f"another process is gone, or has not answered for {seconds} s ({first_line})"
            fix = (
                "see what the other processes say, and go on with --resume; if one is slow: train.dist.timeout_seconds"
            )
            raise ParallelError(f"rank {self.rank}: {what} · fix: {fix}") from error

    def close(self) -> None:
        """Leaves the other processes, once all of them are ready to; call it last, and not after an error."""
        if self.size == 1 or not self._is_owner or not dist.is_initialized():
            return
        dist.barrier(group=self._control)
        dist.destroy_process_group()


def device_of(name: str | None, config: DistConfig) -> torch.device:
    """Returns where this process trains: what ``train.device`` names, or CUDA where there is one.

    Raises:
        ConfigError: it cannot be used, or there are fewer devices than processes on this machine.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if config.tensor_parallel_size > 1 and name.startswith("cuda"):
        local, local_size = (int(os.environ.get(key, default)) for key, default in _LOCAL)
        if name != "cuda":
            fix = "train.device=cuda, and each process takes one of its own"
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
        first_line = str(error).split("\n", 1)[0]
        fix = "leave train.device out, and the device is picked"
        raise ConfigError(f"train.device: {name!r} cannot be used ({first_line}) · fix: {fix}") from error


_LOCAL = (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))


def _check_started(wanted: int) -> None:
    started = dist.get_world_size() if dist.is_available() and dist.is_initialized() else _world_size()
    if wanted > 1 and not dist.is_available():
        fix = "train.dist.tensor_parallel_size=1, or another build"
        raise ConfigError(f"train.dist.tensor_parallel_size: this PyTorch has no torch.distributed · fix: {fix}")
    if started == wanted:
        return
    if started == 1:
        what = f"train.dist.tensor_parallel_size: {wanted}, and 1 process was started"
        raise ConfigError(f"{what} · fix: torchrun --nproc-per-node {wanted} -m graphckpt train ...")
    fix = f"train.dist.tensor_parallel_size={started}, or torchrun --nproc-per-node {wanted}"
    raise ConfigError(f"train.dist.tensor_parallel_size: {wanted}, and {started} processes were started · fix: {fix}")


def _world_size() -> int:
    value = os.environ.get("WORLD_SIZE", "1")
    return int(value) if value.isdigit() else 1
