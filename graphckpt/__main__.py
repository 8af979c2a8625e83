"""``python -m graphckpt`` is the command ``graphckpt``."""

import gc
import sys
from typing import NoReturn

from graphckpt.cli import main


def run() -> NoReturn:
    """Runs the command line and exits."""
    code = main()
    if sys.argv[1:2] != ["train"]:  # whose hooks may have left files open, which the garbage collector closes
        gc.freeze()  # else Python would visit the objects of all packages again, a second or more, before it exits
    sys.exit(code)


if __name__ == "__main__":
    run()
