"""The table of ``graphckpt selftest``: whether results were equal, by rule and store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphckpt.ledger.table import Column, table_of, text_of
from graphckpt.selftest.checks import CLOSE, EQUAL, SKIPPED, CheckResult
from graphckpt.selftest.subjects import RULES, STORES


def report(machine: str, rows: Sequence[CheckResult], seconds: float) -> str:
    """Returns a text to read, and to paste into an issue."""
    faults = [row for row in rows if row.is_fault]
    num_checks = sum(row.outcome != SKIPPED for row in rows)
    verdict = f"{len(faults)} of {num_checks} checks failed" if faults else f"all {num_checks} checks passed"
    parts = [machine, _policies(rows), *_others(rows), f"{verdict}, {seconds:.0f} s"]
    if faults:
        parts.append("please open an issue with this text")
    return "\n".join(parts)


def _policies(rows: Sequence[CheckResult]) -> str:
    """Returns a table of the rules by stores: over all models, each cell has the outcomes that differ."""
    cells: dict[tuple[str, str], list[CheckResult]] = {}
    for row in rows:
        cells.setdefault((row.check, row.store), []).append(row)
    lines = [[rule, *(_cell(cells.get((rule, store), [])) for store in STORES)] for rule in RULES]
    return text_of([table_of([Column("policy"), *map(Column, STORES)], lines)]).rstrip()


def _cell(rows: Sequence[CheckResult]) -> str:
    outcomes = dict.fromkeys(row.outcome for row in rows)
    faults = sum(row.is_fault for row in rows)
    if faults:
        return f"FAILED {faults} of {len(rows)}"
    return ", ".join(outcomes) or "-"


def _others(rows: Sequence[CheckResult]) -> Iterator[str]:
    for row in rows:
        if row.check not in RULES:
            subject = f", {row.subject}" if row.outcome != SKIPPED else ""
            detail = f": {row.detail}" if row.detail else ""
            yield f"{row.check}{subject}: {row.outcome}{detail}"
    for row in rows:
        if row.check in RULES and (row.is_fault or (row.detail and row.outcome not in (EQUAL, CLOSE, SKIPPED))):
            yield f"FAILED: {row.check}, {row.store}, {row.subject}: {row.detail}"
