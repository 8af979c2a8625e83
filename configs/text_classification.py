"""A small BERT tells in which package of Python's standard library a text stands."""

from transformers import BertForSequenceClassification

from graphckpt.config import LazyCall
from graphckpt.train.tasks import SequenceClassification

from .common.data import data
from .common.models.bert import model
from .common.optim import optim
from .common.train import train

task = LazyCall(SequenceClassification)()

data.seq_length = 128

model = LazyCall(BertForSequenceClassification)(config=model.config)
model.config.update(num_hidden_layers=4, hidden_size=256, num_attention_heads=4, intermediate_size=1024)
model.config.num_labels = 64  # as many as there are folders in data.paths, or more

optim.lr = 5e-4

train.output_dir = "output/text_classification"
train.train_micro_batch_size = 16
train.train_iter = 1000
train.evaluation.eval_period = 250
