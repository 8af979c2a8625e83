"""``python -m graphckpt`` is the command ``graphckpt``."""

import sys

from graphckpt.cli import main

sys.exit(main())
