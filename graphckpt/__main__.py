"""``python -m graphckpt`` is the command ``graphckpt``."""

import os
import sys
from pathlib import Path
from typing import NoReturn

from graphckpt.cli import main


def run() -> NoReturn:
    """Runs the command line and exits; with 1 if what reads its output has closed the pipe."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere  # None if they were closed
        try:
            try:
                code = main()
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # Python flushes it once more as it exits
            code = 1
    sys.exit(code)


if __name__ == "__main__":
    run()
