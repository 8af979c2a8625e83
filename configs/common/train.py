"""How a run goes. Every key of ``train``, with its default."""

from graphckpt.config import LazyCall
from graphckpt.train.optim import warmup_cosine_lr

train = {
    "output_dir": "output",
    "train_micro_batch_size": 32,  # sequences in one forward
    "test_micro_batch_size": 32,
    "num_accumulation_steps": 1,  # forwards for one update of the weights
    "train_iter": 10000,  # updates of the weights
    "warmup_ratio": 0.01,  # share of train_iter in which the learning rate rises
    "scheduler": LazyCall(warmup_cosine_lr)(warmup_factor=0.001, alpha=0.01),
    "load_weight": "",  # a folder with model.safetensors to start from
    "checkpointer": {
        "period": 5000,  # and once at the end
        "max_to_keep": 100,
        "save_model_after_n_epoch": None,  # or by passes over the text
    },
    "log_period": 20,
    "tensorboard": False,
    "seed": 1234,
    "device": None,  # None picks CUDA where there is one, else the CPU
    "amp": {"enabled": False, "dtype": "bfloat16"},
    "activation_checkpoint": {
        "enabled": False,
        "rule": True,  # for every layer of the model
        "blocks": None,  # or by name: {"transformer.h.*": {"activation_checkpointing": "selective"}}
    },
    "evaluation": {
        "enabled": True,
        "eval_period": 1000,  # and once at the end
        "eval_iter": None,  # at most so many batches
        "eval_metric": None,  # what model_best is best at, such as "eval_ppl"; None: what the task says
        "eval_mode": None,  # "min" or "max"
    },
}
