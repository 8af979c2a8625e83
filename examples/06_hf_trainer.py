"""BERT for sequence classification on random tokens in Transformers' Trainer: peak memory and speed of each policy.

python examples/06_hf_trainer.py [--layers 24 --width 1024 --heads 16 --samples 512 --length 512 --batch 4]
Needs: pip install '.[transformers-trainer]'. On a GPU where there is one; the sizes are those of BERT-large.
"""

import argparse
import tempfile

import torch
from torch.utils.data import StackDataset
from transformers import BertConfig, BertForSequenceClassification, PrinterCallback, Trainer, TrainingArguments

from graphckpt.integrations.transformers import GraphckptCallback
from graphckpt.ledger.live_memory import LiveBytes
from graphckpt.units import format_bytes

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--layers", type=int, default=24)
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--heads", type=int, default=16)
parser.add_argument("--vocab", type=int, default=30522)
parser.add_argument("--samples", type=int, default=512)
parser.add_argument("--length", type=int, default=512)
parser.add_argument("--batch", type=int, default=4)
args = parser.parse_args()

generator = torch.Generator().manual_seed(0)
tokens = torch.randint(100, args.vocab, (args.samples, args.length), generator=generator)
data = StackDataset(input_ids=tokens, labels=torch.randint(0, 2, (args.samples,), generator=generator))
config = BertConfig(
    vocab_size=args.vocab,
    num_hidden_layers=args.layers,
    hidden_size=args.width,
    intermediate_size=4 * args.width,
    num_attention_heads=args.heads,
    max_position_embeddings=args.length,
)
on_cuda = torch.cuda.is_available()

VARIANTS = {
    "keep all": (None, False),
    "Transformers' own": (None, True),
    "full": (GraphckptCallback(rule="full", report=False), False),
    "full, last layer kept": (
        GraphckptCallback(rule="full", policies={f"*.layer.{args.layers - 1}": False}, report=False),
        False,
    ),
    "selective": (GraphckptCallback(rule="selective", report=False), False),
}


def make_trainer(callback: GraphckptCallback | None, own: bool, folder: str, steps: int) -> Trainer:
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=args.batch,
        activation_checkpointing=own,
        dataloader_pin_memory=on_cuda,
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
    )
    model = BertForSequenceClassification(config)
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[callback] if callback else [])
    trainer.remove_callback(PrinterCallback)
    return trainer


def peak_of_a_step(callback: GraphckptCallback | None, own: bool, folder: str) -> int:
    """Bytes of all tensors at the highest, optimizer state included: the CUDA allocator's, or all storages on a CPU."""
    trainer = make_trainer(callback, own, folder, steps=2)
    if on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        trainer.train()
        return torch.cuda.max_memory_allocated()
    with LiveBytes(record_timeline=False) as live:
        live.track(trainer.model.parameters())
        trainer.train()
    return live.peak_bytes


steps = args.samples // args.batch
sizes = (
    f"{args.layers} layers of width {args.width}, {args.samples} samples of {args.length} tokens, batch {args.batch}"
)
print(f"BERT, {sizes}, {'on CUDA' if on_cuda else 'on a CPU'}, torch {torch.__version__}")
print(f"{'policy':22} {'peak':>10} {'samples/s':>10} {'loss':>10}")
losses = set()
with tempfile.TemporaryDirectory() as folder:
    for name, (callback, own) in VARIANTS.items():
        peak = peak_of_a_step(callback, own, folder)
        seen = make_trainer(callback, own, folder, steps).train()
        losses.add(seen.training_loss)
        speed = seen.metrics["train_samples_per_second"]
        print(f"{name:22} {format_bytes(peak):>10} {speed:10.2f} {seen.training_loss:10.6f}", flush=True)
assert len(losses) == 1, "the losses differ"
print("the losses are equal in every bit")
