"""Writes a small run by the code of another commit, stopped after 4 of its 10 iterations, into a zip: see README.md."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CONFIG = """
from graphckpt.config import get_config

data = get_config("common/data.py").data
model = get_config("common/models/gpt2.py").model
optim = get_config("common/optim.py").optim
train = get_config("common/train.py").train

data.update(paths="texts", cache_dir="cache", vocab_size=270, seq_length=16, eval_fraction=0.2)
model.config.update(n_layer=1, n_head=2, n_embd=8)
optim.lr = 5e-3
train.update(output_dir="out", train_micro_batch_size=2, num_accumulation_steps=2, test_micro_batch_size=4)
train.update(train_iter=10, log_period=3, warmup_ratio=0.2, device="cpu")
train.checkpointer.update(period=4, max_to_keep=2)
train.evaluation.update(eval_period=3, eval_iter=2)
"""
"""As in ``helpers/small_run.py``, which imports this version of the package; with a smaller model."""


def train(code: str, words: list[str]) -> None:
    sys.path.insert(0, code)
    import torch  # noqa: PLC0415

    from graphckpt.train.loop import HookBase  # noqa: PLC0415

    try:
        from graphckpt.config.trainer import trainer_from  # noqa: PLC0415
    except ImportError:  # before d2fad775
        from graphckpt.config.run import trainer_from  # noqa: PLC0415

    class Stop(HookBase):
        def after_step(self, loop):
            if loop.done == 4:
                os.kill(os.getpid(), signal.SIGINT)

    torch.set_num_threads(1)
    trainer = trainer_from("tiny.py", words)
    trainer._more_hooks = (Stop(),)
    trainer.train()


def main(code: str, target: str, num_ranks: str, *words: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    file = Path(target).resolve()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        generator = random.Random(0)
        (place / "texts").mkdir()
        for index in range(20):
            text = " ".join(generator.choices([f"w{n}" for n in range(30)], k=300))
            (place / "texts" / f"{index}.txt").write_text(f"text {index}: {text}\n", encoding="utf-8")
        (place / "tiny.py").write_text(CONFIG, encoding="utf-8")
        own = [sys.executable, str(Path(__file__).resolve()), "train", str(Path(code).resolve()), *words]
        processes = []
        for rank in range(int(num_ranks)):
            group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": num_ranks}
            group |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            environment = {**os.environ, **(group if num_ranks != "1" else {})}
            processes.append(subprocess.Popen(own, cwd=place, env=environment))
        assert [process.wait() for process in processes] == [0] * int(num_ranks)
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for path in sorted((place / "out").rglob("*")):
                if path.is_file() and path.suffix not in {".png", ".lock"} and "model_best" not in path.parts:
                    entry = zipfile.ZipInfo(path.relative_to(place).as_posix(), (2026, 1, 1, 0, 0, 0))
                    entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
                    archive.writestr(entry, path.read_bytes())


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(sys.argv[2], sys.argv[3:])
    else:
        main(*sys.argv[1:])
