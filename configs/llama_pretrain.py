"""A Llama of 12 layers of 768 with 12 heads: 134 million parameters."""

from graphckpt.config import LazyCall
from graphckpt.train.tasks import CausalLM

from .common.data import data
from .common.models.llama import model
from .common.optim import optim
from .common.train import train

task = LazyCall(CausalLM)(loss_head=False)  # True: logits and loss in a block of their own, which may run in slices

data.vocab_size = 32000
data.seq_length = 1024

model.config.update(num_hidden_layers=12, hidden_size=768, num_attention_heads=12, num_key_value_heads=12)

optim.lr = 3e-4
optim.weight_decay = 0.1
optim.betas = (0.9, 0.95)

train.output_dir = "output/llama"
train.train_micro_batch_size = 4
train.test_micro_batch_size = 4
train.train_iter = 100000
train.warmup_ratio = 0.01
train.amp.enabled = True
train.evaluation.eval_iter = 64
