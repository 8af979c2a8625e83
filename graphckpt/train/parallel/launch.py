"""How this process was launched: the world size and its device."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from graphckpt.errors import ConfigError, first_line
from graphckpt.train.parallel.config import DistConfig

_LOCAL = (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))


def resolve_device(name: str | None, config: DistConfig) -> torch.device:
    """Returns the device of this process: ``train.device``, or CUDA if available.

    Raises:
        ConfigError: it cannot be used, or there are fewer devices than processes on this machine.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if config.num_processes > 1 and name.startswith("cuda"):
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
        fix = "leave train.device out, and the device is picked"
        raise ConfigError(f"train.device: {name!r} cannot be used ({first_line(error)}) · fix: {fix}") from error


def check_world_size(config: DistConfig) -> None:
    """Checks the world size against the sizes in a config.

    Raises:
        ConfigError: they differ, or there is no ``torch.distributed``.
    """
    wanted = config.num_processes
    started = dist.get_world_size() if dist.is_available() and dist.is_initialized() else _world_size()
    if wanted > 1 and not dist.is_available():
        fix = "leave the section out, or use another build"
        raise ConfigError(f"train.dist: this PyTorch has no torch.distributed · fix: {fix}")
    if started == wanted:
        return
    what = f"train.dist: {config.describe()} is {wanted}"
    launch = f"torchrun --nproc-per-node {wanted} -m graphckpt train ..."
    if started == 1:
        raise ConfigError(f"{what}, and 1 process was started · fix: {launch}")
    fixes = [launch]
    others = config.tensor_parallel_size * config.pipeline_parallel_size
    if started % others == 0:
        fixes.insert(0, f"train.dist.data_parallel_size={started // others}")
    raise ConfigError(f"{what}, and {started} processes were started · fix: {', or '.join(fixes)}")


def _world_size() -> int:
    value = os.environ.get("WORLD_SIZE", "1")
    return int(value) if value.isdigit() else 1
