"""Puts a model's config and the tokenizer beside its weights, so that Transformers loads the folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch import nn

from graphckpt.train.tokenizer import END_OF_TEXT


def export(model: Any, architecture: str, tokenizer_file: Path | None, folder: Path, *, seq_length: int) -> None:
    """Writes the config of a Transformers model, if it is one, and the tokenizer, if any, into ``folder``.

    Args:
        model: that was trained.
        architecture: the name of its class, which is another where its weights are cut.
        tokenizer_file: its tokenizer, if any.
        folder: where to.
        seq_length: tokens of a sample.
    """
    if _is_of_transformers(model):
        model.config.architectures = [architecture]
        model.config.save_pretrained(folder)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
    if tokenizer_file is None:
        return
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - takes seconds, which other models can do without

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_file),
        eos_token=END_OF_TEXT,
        model_max_length=seq_length,
    )
    tokenizer.save_pretrained(folder)


def _is_of_transformers(model: nn.Module) -> bool:
    if "transformers" not in sys.modules:  # then nobody can have made one
        return False
    from transformers import PreTrainedModel  # noqa: PLC0415 - as above

    return isinstance(model, PreTrainedModel)
