"""Loads the simulated CUDA device when Python starts: for a process, and those that it starts, with this folder and
`tests` on ``PYTHONPATH``. Without a compiler it does nothing.
"""

import sys
from contextlib import suppress

from simulated_cuda.bindings import install_on_import
from simulated_cuda.build import NoCompiler
from simulated_cuda.library import load

if "torch" not in sys.modules:
    with suppress(NoCompiler):
        load()
        install_on_import()
