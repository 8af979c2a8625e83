import gc
import subprocess
import sys
from pathlib import Path

import pytest

from graphckpt.cli import main
from graphckpt.collection import rare_collection, without_collection


def test_without_collection_restores_what_was(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(gc.enable)
    with without_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    with without_collection():
        pass
    assert not gc.isenabled()


def test_rare_collection_keeps_young_garbage_and_restores_the_thresholds() -> None:
    class Node:
        num_alive = 0

        def __init__(self) -> None:
            Node.num_alive += 1
            self.itself = self

        def __del__(self) -> None:
            Node.num_alive -= 1

    def most_alive() -> int:
        most = 0
        for _ in range(20_000):
            Node()
            most = max(most, Node.num_alive)
        return most

    before = gc.get_threshold()
    gc.collect()
    frequent = most_alive()
    with rare_collection():
        assert most_alive() > 10 * frequent
    assert gc.get_threshold() == before


def test_a_failed_plan_restores_the_thresholds(capsys: pytest.CaptureFixture[str]) -> None:
    before = gc.get_threshold()
    assert main(["plan", "--config-file", "absent.py", "--device", "h200"]) == 2
    assert "absent.py" in capsys.readouterr().err
    assert gc.get_threshold() == before


LEFT_OPEN = """
import gc, sys
import graphckpt.__main__ as command

class Loop:
    def __init__(self, file):
        self.file = file
        self.itself = self

def main():
    file = open(sys.argv[2], "w")
    file.write("a row")
    gc.collect()  # a file as young as its cycle would be lost in any case: Python closes what it writes to first
    Loop(file)
    return 3

command.main = main
command.run()
"""


def test_training_writes_files_that_were_left_open(tmp_path: Path) -> None:
    file = tmp_path / "rows.txt"
    assert subprocess.run([sys.executable, "-c", LEFT_OPEN, "train", str(file)], check=False).returncode == 3
    assert file.read_text() == "a row"
