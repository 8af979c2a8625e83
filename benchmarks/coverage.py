"""Writes the branch coverage of the last ``make coverage``, by package.

make coverage
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

from report import header, table, write


def main() -> None:
    """Reads the JSON report of coverage.py, and writes lines and branches by package."""
    report = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for name, file in report["files"].items():
        parts = Path(name).parts
        for package in ("graphckpt", parts[1] if len(parts) > 2 else "(top)"):
            counts[package] += Counter({key: value for key, value in file["summary"].items() if isinstance(value, int)})
    rows = []
    for package, count in sorted(counts.items(), key=lambda item: -item[1]["num_statements"]):
        total = count["num_statements"] + count["num_branches"]
        percent = 100 * (count["covered_lines"] + count["covered_branches"]) / total if total else 100.0
        keys = ("num_statements", "covered_lines", "num_branches", "covered_branches")
        rows.append({"package": package, **{key: count[key] for key in keys}, "percent": round(percent, 2)})
    tests = "those of `make test`, also those on the simulated device; processes that tests start are not counted"
    head = header(tests=tests)
    write("coverage", head, rows, table(list(rows[0]), [[str(value) for value in row.values()] for row in rows]))


if __name__ == "__main__":
    main()
