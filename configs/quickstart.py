"""A small GPT-2 learns the source text of Python's standard library: minutes on two cores."""

from graphckpt.config import LazyCall
from graphckpt.train.tasks import CausalLM

from .common.data import data
from .common.models.gpt2 import model
from .common.optim import optim
from .common.train import train

task = LazyCall(CausalLM)(loss_head=False)  # True: logits and loss in a block of their own, which may run in slices

data.vocab_size = 4096
data.seq_length = 128

model.config.n_layer = 6
model.config.n_head = 6
model.config.n_embd = 192

optim.lr = 1e-3
optim.weight_decay = 0.1
optim.betas = (0.9, 0.95)

train.output_dir = "output/quickstart"
train.train_micro_batch_size = 8
train.train_iter = 200
train.warmup_ratio = 0.1
train.log_period = 10
train.evaluation.eval_period = 100
train.evaluation.eval_iter = 8  # of 32 sequences each
train.activation_checkpoint.enabled = True
