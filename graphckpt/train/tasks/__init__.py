"""Training tasks, one file each: samples, losses and metrics."""

from graphckpt.train.data.samples import Opened, Samples
from graphckpt.train.tasks.base import Task, TextTask
from graphckpt.train.tasks.causal_lm import CausalLM
from graphckpt.train.tasks.classification import SequenceClassification
from graphckpt.train.tasks.masked_lm import MaskedLM
from graphckpt.train.tasks.own import OwnLoss

__all__ = ["CausalLM", "MaskedLM", "Opened", "OwnLoss", "Samples", "SequenceClassification", "Task", "TextTask"]
