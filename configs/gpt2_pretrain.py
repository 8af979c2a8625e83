"""GPT-2 of 12 layers of 768 with 12 heads: 124 million parameters."""

from graphckpt.config import LazyCall
from graphckpt.train.tasks import CausalLM

from .common.data import data
from .common.models.gpt2 import model
from .common.optim import optim
from .common.train import train

task = LazyCall(CausalLM)(loss_head=False)  # True: logits and loss in a block of their own, which may run in slices

data.vocab_size = 50257
data.seq_length = 1024

model.config.update(n_layer=12, n_embd=768, n_head=12)

optim.lr = 1.5e-4
optim.weight_decay = 0.1
optim.betas = (0.9, 0.95)

train.output_dir = "output/gpt2"
train.train_micro_batch_size = 4
train.test_micro_batch_size = 4
train.train_iter = 100000
train.warmup_ratio = 0.01
train.amp.enabled = True
train.evaluation.eval_iter = 64
