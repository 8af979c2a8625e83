"""BERT-large, 24 layers of 1024 with 16 heads: masked tokens and next sentence. 335 million parameters."""

from graphckpt.config import LazyCall
from graphckpt.train.tasks import MaskedLM

from .common.data import data
from .common.models.bert import model
from .common.optim import optim
from .common.train import train

task = LazyCall(MaskedLM)(mask_fraction=0.15, random_fraction=0.5)

data.vocab_size = 30522
data.seq_length = 512

model.config.num_hidden_layers = 24
model.config.hidden_size = 1024
model.config.num_attention_heads = 16
model.config.intermediate_size = 4096

optim.lr = 1e-4
optim.weight_decay = 0.01

train.output_dir = "output/bert_large"
train.train_micro_batch_size = 16
train.test_micro_batch_size = 16
train.train_iter = 100000
train.warmup_ratio = 0.01
train.amp.enabled = True
train.evaluation.eval_iter = 64
