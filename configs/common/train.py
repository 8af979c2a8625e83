"""How a run goes. Every key of ``train``, with its default."""

from graphckpt.config import LazyCall
from graphckpt.train.optim import warmup_cosine_lr

train = {
    "output_dir": "output",
    "overwrite": False,  # whether a run that is there already is replaced
    "train_micro_batch_size": 32,  # samples in one forward
    "global_batch_size": None,  # samples of one update: micro batch x data parallel x accumulation
    "num_accumulation_steps": None,  # forwards for one update; of these three, what is None is derived
    "test_micro_batch_size": 32,
    "train_iter": 10000,  # updates of the weights, at least
    "train_epoch": 0,  # times through the data, if that is more
    "train_samples": None,  # or so many samples, and nothing else
    "consumed_train_samples": 0,  # of the data's order, left out at the start
    "consumed_valid_samples": 0,
    "start_iter": 0,
    "warmup_ratio": 0.01,  # share of the updates in which the learning rate rises
    "scheduler": LazyCall(warmup_cosine_lr)(warmup_factor=0.001, alpha=0.01),
    "load_weight": "",  # a folder of weights to start from: a snapshot, or what Transformers saved
    "checkpointer": {
        "period": 5000,  # and once at the end
        "max_to_keep": 100,
        "save_model_after_n_epoch": None,  # or by passes over the data
        "async_save": False,  # write a copy while training goes on
    },
    "log_period": 20,
    "tensorboard": False,
    "wandb": {"enabled": False, "project": "graphckpt", "name": None, "mode": "online"},
    "seed": 1234,
    "device": None,  # None picks CUDA where there is one, else the CPU
    "capture": "auto",  # one CUDA graph for a step where it can be; "cuda_graph" insists, "eager" never
    "amp": {"enabled": False, "dtype": "bfloat16"},
    "activation_checkpoint": {
        "enabled": False,
        "rule": True,  # for every selected block: True, "selective", {"rule": "segments", ...}, or None
        "select": None,  # class names or name patterns; None: the layers that Transformers recomputes
        "policies": None,  # on top, by name pattern: {"transformer.h.[01]": False}
        "offload": None,
        "partition": None,
        "contiguous": None,
        "determinism_check": None,  # "none", "default", or "values": the values of every call are compared
        "compile": None,  # torch.compile of each selected block, inside of its policy: True, or a dict of options
        "plan": None,  # a file of `graphckpt plan --save`: its policies, in place of the keys above
        "memory_budget": None,  # "12GiB": policies are planned for it, in place of the keys above
        "fit": None,  # "throughput" or "batch": micro-batch and accumulation are chosen for global_batch_size
        "host_budget": None,  # beside it, the most bytes that may be offloaded at a time: "64GiB"
        "candidates": None,  # beside it, the rules to consider: ["full", "joined"]; None: all
        "check": True,  # beside it, run the step under the plan, and plan again if the peak is off
        "on_out_of_memory": "replan",  # policies are planned anew, and the update is repeated; or "raise"
        "head": None,  # beside it: {"loss_head": {"rule": "tiles", "num_tiles": 8, "reduce": "sum"}}
    },
    "evaluation": {
        "enabled": True,
        "eval_period": 1000,  # and once at the end
        "eval_after_n_epoch": None,  # or by passes over the data
        "eval_iter": None,  # at most so many batches
        "eval_metric": None,  # what model_best is best at, such as "eval_ppl"; None: what the task says
        "eval_mode": None,  # "min" or "max"
    },
    "dist": {
        "data_parallel_size": 1,  # groups of processes that each learn from a part of every batch
        "tensor_parallel_size": 1,  # processes that share each matrix
        "pipeline_parallel_size": 1,  # stages that share the layers; torchrun starts the product of all three
        "find_unused_parameters": False,  # whether a step may leave parameters without a gradient, without ZeRO
        "timeout_seconds": 600,  # how long a process waits for another
    },
    "zero_optimization": {"enabled": False, "stage": 1},  # 1: optimizer states, 2: gradients too, 3: weights too
}
