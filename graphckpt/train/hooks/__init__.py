"""The trainer's hooks, one file each."""

from graphckpt.train.hooks.evaluate import EvalHook
from graphckpt.train.hooks.explain import ExplainHook
from graphckpt.train.hooks.log import LogHook
from graphckpt.train.hooks.metrics import MetricsHook
from graphckpt.train.hooks.snapshot import BestHook, SnapshotHook
from graphckpt.train.hooks.start import StartHook
from graphckpt.train.hooks.tensorboard import TensorBoardHook
from graphckpt.train.hooks.wandb import WandbHook

__all__ = [
    "BestHook",
    "EvalHook",
    "ExplainHook",
    "LogHook",
    "MetricsHook",
    "SnapshotHook",
    "StartHook",
    "TensorBoardHook",
    "WandbHook",
]
