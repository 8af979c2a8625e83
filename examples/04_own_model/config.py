"""Trains them. Run: graphckpt train --config-file examples/04_own_model/config.py."""

from torch.optim import AdamW
from waves import Regressor, points

from graphckpt.config import LazyCall
from graphckpt.train.own_data import OwnData
from graphckpt.train.tasks import OwnLoss

task = LazyCall(OwnLoss)()
data = LazyCall(OwnData)(train=LazyCall(points)(size=4096, seed=0), heldout=LazyCall(points)(size=512, seed=1))
model = LazyCall(Regressor)(width=64, depth=4)
optim = LazyCall(AdamW)(lr=1e-3)
train = {"output_dir": "output/waves", "train_iter": 300, "activation_checkpoint": {"enabled": True, "select": "Block"}}
