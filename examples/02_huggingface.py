"""GPT-2 from Transformers in a plain loop, with policies put on its layers. Run: python examples/02_huggingface.py."""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import graphckpt

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--plot", help="file for a picture of the live bytes, .png or .svg")
args = parser.parse_args()

torch.manual_seed(0)
config = GPT2Config(
    n_layer=args.layers,
    n_embd=args.width,
    n_head=4,
    n_positions=128,
    vocab_size=1000,
    bos_token_id=0,
    eos_token_id=0,
    loss_type="ForCausalLM",
)
model = GPT2LMHeadModel(config).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
input_ids = torch.randint(0, config.vocab_size, (4, 128))

policies = {
    "transformer.h.*": True,  # every layer keeps its inputs and runs again in backward,
    "transformer.h.0": "selective",  # but the first also keeps what its matmuls and attention made,
    f"transformer.h.{args.layers - 1}": False,  # and the last keeps all, which costs memory and saves time
}


def train_step() -> torch.Tensor:
    loss = model(input_ids, labels=input_ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


with graphckpt.apply(model, policies) as handle:
    for number in range(args.steps):
        print(f"step {number}  loss {train_step().item():.4f}")
    with handle.measure():
        train_step()
    handle.explain(plot=args.plot)
