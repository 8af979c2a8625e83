"""The end of ``--help`` of each command: examples and exit codes."""

TRAIN = """\
examples:
  graphckpt train --config-file configs/quickstart.py
  graphckpt train --config-file configs/quickstart.py --fast-dev-run
  graphckpt train --config-file configs/quickstart.py --resume
  graphckpt train --config-file configs/quickstart.py --eval-only
  graphckpt train --config-file configs/quickstart.py train.train_iter=1000 optim.lr=3e-4
  graphckpt train --config-file configs/quickstart.py 'data.paths=[~/texts, notes.txt]'
  graphckpt train --config-file configs/quickstart.py train.activation_checkpoint.enabled=False
  torchrun --nproc-per-node 2 -m graphckpt train --config-file configs/quickstart.py train.dist.tensor_parallel_size=2
  graphckpt train --config-file configs/quickstart.py \\
      'train.activation_checkpoint.policies={"transformer.h.*": {"activation_checkpointing": "selective"}}'

sections of a config:
  data    texts or a data set, tokenizer, sequence length
  model   the model and its arguments
  optim   the optimizer and its arguments, weight decay, gradient clipping
  train   iterations, batch sizes, evaluation, snapshots, parallelism, train.activation_checkpoint
  task    how the loss is computed
  hooks   more hooks of the training loop

--print-config lists every key with its value. docs/reference/config.md describes them. The packaged configs
(quickstart, bert_large_pretrain, gpt2_pretrain, llama_pretrain, text_classification) are found by name from any folder:
--config-file quickstart.py. Unknown keys and values of the wrong type are reported before anything runs.

exit codes: 0 done, 2 invalid input, 130 stopped by Ctrl-C after a snapshot
"""

PLAN = """\
examples:
  graphckpt plan --config-file configs/gpt2_pretrain.py --device h200 --memory-budget 24GiB
  graphckpt plan --config-file configs/gpt2_pretrain.py --device h200 --memory-budget 48GiB \\
      train.train_micro_batch_size=64
  graphckpt plan --config-file configs/llama_pretrain.py --device rtx4090 --memory-budget max --offload cpu
  graphckpt plan --config-file configs/gpt2_pretrain.py --device a100-80g --memory-budget 0.6 --save plan.yaml
  graphckpt plan --config-file configs/gpt2_pretrain.py --device h100 --memory 24GiB
  graphckpt plan --config-file configs/gpt2_pretrain.py --device h200 --json > plan.json
  graphckpt plan --config-file configs/llama_pretrain.py --device h100 --cluster dgx-h100 \\
      train.dist.data_parallel_size=8 train.dist.tensor_parallel_size=8
  graphckpt plan --config-file configs/gpt2_pretrain.py --device h200 --sweep front.png
  graphckpt plan --config-file configs/gpt2_pretrain.py --device h200 --memory-budget min \\
      --head loss_head=tiles:8:sum task.loss_head=True

  graphckpt plan --config-file configs/llama_pretrain.py --device h200 --memory-budget 24GiB \\
      train.dist.data_parallel_size=8 train.zero_optimization.enabled=True train.zero_optimization.stage=3

The device may be absent, and no tensor allocates memory. With train.dist and train.zero_optimization one rank is
planned, and of a pipeline one rank of each stage. The file of --save has a section `policies` for
train.activation_checkpoint.

exit codes: 0 done, 2 invalid input, such as a budget that no plan fits, 130 stopped by Ctrl-C
"""

FIT = """\
examples:
  graphckpt fit --config-file configs/gpt2_pretrain.py --device h200
  graphckpt fit --config-file configs/gpt2_pretrain.py --device rtx4090 --global-batch-size 512 --plot fit.png
  graphckpt fit --config-file configs/gpt2_pretrain.py --device a100-80g --memory-budget 40GiB --batch-sizes 8,16,32
  graphckpt fit --config-file configs/gpt2_pretrain.py --device h200 --batch-sizes 1:64 --json
  graphckpt fit --config-file configs/llama_pretrain.py --device h100 --sequence-lengths 1024,2048,4096
  graphckpt fit --config-file configs/gpt2_pretrain.py --device h200 task.loss_head=True --head loss_head=tiles:8:sum
  graphckpt fit --config-file configs/llama_pretrain.py --device h200 --world-size 64 train.global_batch_size=256
  graphckpt fit --config-file configs/llama_pretrain.py --device h200 --world-size 16 train.global_batch_size=64 \\
      --layout "dp=16 zero=3" --layout "dp=4 tp=4 zero=2"

The device may be absent, and no tensor allocates memory. With train.dist and train.zero_optimization the step and its
batch sizes are those of one rank. The step is simulated at each batch size of the table, under all policies and then
under its plan. The largest batch is exact: with one sample more, no plan fits. With --world-size layouts are compared
instead, of which at most 12 are simulated.

exit codes: 0 done, 2 invalid input, such as a budget that no batch fits, 130 stopped by Ctrl-C
"""

ESTIMATE = """\
examples:
  graphckpt estimate meta-llama/Llama-3.1-8B --device h100 --batch 4 --seq 4096
  graphckpt estimate ./my_model --device rtx4090 --batch 1 --seq 2048 --lora 16
  graphckpt estimate config.json --device h100 --memory 40GiB --optimizer adamw-fused --autocast bfloat16
  graphckpt estimate google-bert/bert-large-uncased --device a100-80g --batch 64 --policy full --json

MODEL is a folder with a config.json, that file, or the name of a Transformers model in its cache or on the hub. Weights
are not loaded, the code of a model is not run, and no tensor allocates memory. The device may be absent.

exit codes: 0 done, 2 invalid input, 130 stopped by Ctrl-C
"""

SELFTEST = """\
examples:
  graphckpt selftest
  graphckpt selftest --device cpu
  graphckpt selftest --json > selftest.json

Small models with dropout, BatchNorm, attention and autocast train under every rule and store, and every bit of their
gradients, weights, buffers and RNG states is compared with the plain step. If the plain step differs from itself, the
ops are named, and compared by tolerance. Then: a captured step, offloading while other streams are busy, predicted and
measured memory, and the rates of copies. It takes less than two minutes, and less than 1 GiB of memory.

exit codes: 0 all checks passed, 1 a check failed, 2 invalid input, 130 stopped by Ctrl-C
"""

PROFILE = """\
examples:
  graphckpt profile-device my_gpu.yaml
  graphckpt profile-device my_cpu.yaml --device cpu --seconds 0.1
  graphckpt plan --config-file quickstart.py --device my_gpu.yaml

exit codes: 0 done, 2 invalid input, 130 stopped by Ctrl-C
"""
