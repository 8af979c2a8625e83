"""Puts a model's config and the tokenizer beside its weights, so that Transformers loads the folder."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from graphckpt.train.tokenizer import END_OF_TEXT


def export(model: nn.Module, architecture: str, tokenizer_file: Path | None, folder: Path, *, seq_length: int) -> None:
    """Writes the config of a Transformers model, if it is one, and the tokenizer, if any, into ``folder``.

    Args:
        model: that was trained.
        architecture: the name of its class, which is another where its weights are cut.
        tokenizer_file: its tokenizer, if any.
        folder: where to.
        seq_length: tokens of a sample.
    """
    if isinstance(model, PreTrainedModel):
        model.config.architectures = [architecture]
        model.config.save_pretrained(folder)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
    if tokenizer_file is None:
        return
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_file),
        eos_token=END_OF_TEXT,
        model_max_length=seq_length,
    )
    tokenizer.save_pretrained(folder)
