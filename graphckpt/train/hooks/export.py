"""Saves the trained model as a folder that Transformers loads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

from safetensors.torch import save_model
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

from graphckpt.train.loop import HookBase, Loop
from graphckpt.train.tokenizer import END_OF_TEXT


@final
class ExportHook(HookBase):
    """Writes weights as safetensors, with the model's config and the tokenizer where there are such."""

    def __init__(self, model: nn.Module, tokenizer_file: Path | None, folder: Path, *, seq_length: int) -> None:
        self._model = model
        self._tokenizer_file = tokenizer_file
        self._folder = folder
        self._seq_length = seq_length

    def after_train(self, loop: Loop) -> None:
        """Saves, also after the user's stop."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if isinstance(self._model, PreTrainedModel):
            with _no_bar():
                self._model.save_pretrained(self._folder)
        else:
            save_model(self._model, str(self._folder / "model.safetensors"))
        if self._tokenizer_file is None:
            return
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(self._tokenizer_file),
            eos_token=END_OF_TEXT,
            model_max_length=self._seq_length,
        )
        tokenizer.save_pretrained(self._folder)


@contextmanager
def _no_bar() -> Iterator[None]:
    """Keeps Transformers from drawing a bar for the one file that it writes."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
