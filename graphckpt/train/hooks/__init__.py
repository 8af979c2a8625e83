"""What a run does beside its steps, one file each."""

from graphckpt.train.hooks.evaluate import EvalHook
from graphckpt.train.hooks.explain import ExplainHook
from graphckpt.train.hooks.export import ExportHook
from graphckpt.train.hooks.log import LogHook
from graphckpt.train.hooks.metrics import MetricsHook

__all__ = ["EvalHook", "ExplainHook", "ExportHook", "LogHook", "MetricsHook"]
