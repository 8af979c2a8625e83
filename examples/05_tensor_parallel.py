"""GPT-2 cut over processes that share each matrix: keep all, checkpoint, and checkpoint with what is kept moved away.

Run: torchrun --nproc-per-node 4 examples/05_tensor_parallel.py [--layers 4 --width 256 --batch 8], on CPU or on CUDA.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPT2Config, GPT2LMHeadModel

import graphckpt
from graphckpt.ledger.live_memory import LiveBytes
from graphckpt.train.parallel.tensor_parallel import shard_model
from graphckpt.units import format_bytes

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--heads", type=int, default=12)
parser.add_argument("--vocab", type=int, default=50304, help="GPT-2's 50257, up to a number that divides")
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--length", type=int, default=128)
parser.add_argument("--dropout", type=float, default=0.1)
args = parser.parse_args()

device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
tp_mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
is_first = dist.get_rank() == 0

torch.manual_seed(0)  # the same on every rank: they see the same batch, and hold shares of the same weights
config = GPT2Config(
    n_layer=args.layers,
    n_embd=args.width,
    n_head=args.heads,
    n_positions=args.length,
    vocab_size=args.vocab,
    resid_pdrop=args.dropout,
    embd_pdrop=args.dropout,
    attn_pdrop=args.dropout,
    bos_token_id=0,
    eos_token_id=0,
)
model = shard_model(GPT2LMHeadModel(config).to(device).train(), tp_mesh)
model.loss_type = "ForCausalLM"  # what Transformers takes anyway, with a warning
input_ids = torch.randint(0, args.vocab, (args.batch, args.length), device=device)

layers = "transformer.h.*"
moved = {"activation_checkpointing": True, "offload": True, "partition": tp_mesh, "contiguous": True}
modes = {
    "keep all": {layers: False},
    "checkpoint": {layers: {"activation_checkpointing": True}},
    "checkpoint + offload + partition + contiguous": {layers: moved},
}


class Memory:
    """Bytes of the tensors of this rank: the CUDA allocator's, or on the CPU those of all storages that are alive."""

    def __init__(self) -> None:
        self.live = LiveBytes(device="cpu", record_timeline=False)
        self.live.track(model.parameters())
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def now(self) -> int:
        if device.type == "cuda":
            return torch.cuda.memory_allocated()
        time.sleep(0.1)  # gloo's threads let go of a collective's tensors only once Python is free for them
        return self.live.live_bytes

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() if device.type == "cuda" else self.live.peak_bytes


def train_step() -> tuple[list[torch.Tensor], int, int]:
    """Returns the loss and a sum over each gradient, and the bytes after forward and at the peak."""
    torch.manual_seed(1)  # the same dropout in every mode
    model.zero_grad()
    memory = Memory()
    with memory.live:
        loss = model(input_ids, labels=input_ids, use_cache=False).loss
        after_forward = memory.now()
        loss.backward()
    grads = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()]
    return [loss.detach(), *(grad.sum() for grad in grads)], after_forward, memory.peak()


wanted: list[torch.Tensor] | None = None
if is_first:
    sizes = f"{args.layers} layers of width {args.width}, batch {args.batch} x {args.length}"
    print(f"GPT-2, {sizes}, over {dist.get_world_size()} processes on {device.type}")
for name, policies in modes.items():
    with graphckpt.apply(model, policies) as handle:
        train_step()  # sizes slabs, learns the order
        results, after_forward, peak = train_step()
        with handle.measure():
            train_step()
        if is_first:
            print(f"\n{name}")
            handle.explain()
    wanted = wanted or results
    assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True)), f"{name}: the gradients differ"
    rows: list[tuple[int, int]] = [(0, 0)] * dist.get_world_size()
    dist.all_gather_object(rows, (after_forward, peak))
    if is_first:
        for rank, row in enumerate(rows):
            print(f"{name}: rank {rank}: {format_bytes(row[0])} after forward, {format_bytes(row[1])} at peak")
if is_first:
    print("\nloss and gradients are equal in every bit")
dist.barrier()
dist.destroy_process_group()
