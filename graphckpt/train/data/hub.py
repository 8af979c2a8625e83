"""Rows of a Hugging Face data set as documents. The only module that uses the package ``datasets``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, final

from graphckpt.errors import did_you_mean, first_line
from graphckpt.train.data.corpus import DataError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRow:
    """A row of a data set as one document. The text stays in the data set."""

    rows: Any
    """The data set; ``rows[number]`` is a dict."""
    number: int
    column: str
    digest: str
    """SHA-256 of the text, in hex digits."""
    group: str
    num_bytes: int

    @property
    def span(self) -> tuple[int, int]:
        """All of the text, in bytes."""
        return 0, self.num_bytes

    def texts(self) -> Iterator[str]:
        """Yields the text."""
        yield self.rows[self.number][self.column]


def read_rows(
    name: str, *, config: str | None, split: str, text_column: str, label_column: str | None
) -> list[DatasetRow]:
    """Loads a data set and returns its distinct rows with text.

    Args:
        name: of the data set, or a folder that the package can load.
        config: which of its configurations, or ``None`` for the only one.
        split: which of its splits.
        text_column: the column of texts.
        label_column: the column of classes, or ``None``.

    Raises:
        DataError: the package is missing, it cannot load the data set, or there is no such column.
    """
    try:
        datasets: Any = import_module("datasets")
    except ImportError as error:
        fix = "pip install 'graphckpt[datasets]', or name text files in data.paths"
        raise DataError(f"data.dataset: {name!r} needs the package 'datasets' · fix: {fix}") from error
    try:
        rows = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # any error of the network, the disk or the data set's own code
        fix = "check data.dataset, data.dataset_config and data.dataset_split"
        raise DataError(f"data.dataset: {name!r}: {type(error).__name__}: {first_line(error)} · fix: {fix}") from error
    _check_columns(rows.column_names, text_column=text_column, label_column=label_column)
    names = getattr(rows.features.get(label_column), "names", None) if label_column else None
    found: dict[str, DatasetRow] = {}
    for number, row in enumerate(rows):
        text = row[text_column]
        if isinstance(text, str) and text.strip():
            raw = text.encode()
            digest = hashlib.sha256(raw).hexdigest()
            label = row[label_column] if label_column else "."
            found.setdefault(
                digest,
                DatasetRow(
                    rows=rows,
                    number=number,
                    column=text_column,
                    digest=digest,
                    group=str(names[label] if names else label),
                    num_bytes=len(raw),
                ),
            )
    return list(found.values())


def _check_columns(known: Sequence[str], **columns: str | None) -> None:
    faults = [
        f"data.{key}: there is no column {column!r}{did_you_mean(column, known)} · fix: use one of {', '.join(known)}"
        for key, column in columns.items()
        if column is not None and column not in known
    ]
    if faults:
        raise DataError("\n".join(faults))
