"""Keeps the saved tensors of a GPT-2 on disk: all of them, or only its layers' inputs. Every step has the same bits.

python examples/07_places.py [--layers 6] [--width 128] [--batch 4] [--length 128]
"""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import graphckpt

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name, default in (("layers", 6), ("width", 128), ("batch", 4), ("length", 128)):
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()

torch.manual_seed(0)
sizes = {"n_layer": args.layers, "n_embd": args.width, "n_head": 4, "n_positions": args.length, "vocab_size": 1000}
config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
tokens = torch.randint(0, 1000, (args.batch, args.length))

POLICIES = {
    "everything kept": {},
    "everything kept, on disk": {"transformer.h.*": {"offload": "disk"}},
    "inputs kept, on disk": {"transformer.h.*": {"activation_checkpointing": True, "offload": "disk"}},
    "matmuls' results kept, in a slab": {
        "transformer.h.*": {"activation_checkpointing": "selective", "contiguous": True}
    },
}


def step() -> torch.Tensor:
    torch.manual_seed(1)
    model.zero_grad()
    model(input_ids=tokens, labels=tokens).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


plain = step()
for title, policies in POLICIES.items():
    with graphckpt.apply(model, policies) as handle:
        step()  # the first step learns what it keeps
        with handle.measure():
            gradients = step()
        print(f"\n{title}")
        handle.explain()
        assert torch.equal(gradients, plain)
print("\nthe gradients are equal in every bit")
