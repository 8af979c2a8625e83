"""AdamW. Norms and biases do not decay; gradients are clipped group by group."""

from torch.optim import AdamW

from graphckpt.config import LazyCall
from graphckpt.train.optim import get_default_optimizer_params

optim = LazyCall(AdamW)(
    params=LazyCall(get_default_optimizer_params)(
        clip_grad_max_norm=1.0, clip_grad_norm_type=2.0, weight_decay_norm=0.0, weight_decay_bias=0.0
    ),
    lr=1e-4,
    weight_decay=0.01,
    betas=(0.9, 0.999),
    eps=1e-8,
)
