"""Every example runs, warns of nothing, and shows what it is for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers.subprocess_runner import run_script

from graphckpt.units import parse_bytes

OVER_RANKS = {"05_tensor_parallel.py"}  # run by tests/parallel
WITH_TORCHTITAN = {"09_torchtitan.py"}
EXAMPLES = Path(__file__).parent.parent / "examples"
ARGUMENTS = {
    "01_blocks.py": ["--steps", "60"],
    "02_huggingface.py": ["--steps", "3", "--layers", "3", "--width", "32"],
    "03_deep_chain.py": ["--layers", "100", "--width", "32", "--batch", "64"],
    "06_hf_trainer.py": ["--layers=4", "--width=64", "--heads=2", "--vocab=200", "--samples=4", "--length=128"],
    "07_places.py": ["--layers", "3", "--width", "64"],
    "08_torchtitan_style.py": ["--every", "2", "--offload", "disk"],
}


def run(folder: Path, name: str, *more: str) -> str:
    done = run_script(EXAMPLES / name, *ARGUMENTS[name], *more, folder=folder)
    assert done.code == 0, done.stderr
    return done.stdout


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(ARGUMENTS) | OVER_RANKS | WITH_TORCHTITAN


def test_torchtitan_takes_policies_in_the_place_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan", reason="it asks for releases of other packages: an environment of its own")
    done = run_script(EXAMPLES / "09_torchtitan.py", folder=tmp_path)
    assert done.code == 0, done.stderr
    rows = re.findall(r"^(\S.*\S) +([\d.]+) MiB for backward, gradients bitwise equal: True$", done.stdout, re.M)
    num_bytes = {name: float(size) for name, size in rows}
    assert len(num_bytes) == 7
    assert num_bytes["graphckpt, full"] <= num_bytes["torchtitan, FullAC"] < num_bytes["no checkpointing"]


def test_blocks_learns_and_shows_the_recomputed_block(tmp_path: Path) -> None:
    output = run(tmp_path, "01_blocks.py")
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]
    assert losses[-1] < losses[0] / 2
    assert re.search(r"model\.0 +full +\S+ KiB +0 B +1 ", output)


def test_huggingface_mixes_rules_and_draws_the_step(tmp_path: Path) -> None:
    output = run(tmp_path, "02_huggingface.py", "--plot", str(tmp_path / "step.png"))
    for block, rule in (("h.0", r"selective\(matmul\+attention\)"), ("h.1", "full"), ("h.2", "keep")):
        assert re.search(rf"transformer\.{re.escape(block)} +{rule} ", output)
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_deep_chain_keeps_less_with_more_cuts(tmp_path: Path) -> None:
    output = run(tmp_path, "03_deep_chain.py")
    assert "equal in every bit" in output
    kept = {name: parse_bytes(size) for name, size in re.findall(r"^(none|sqrt|log) +([\d.]+ [KM]iB)", output, re.M)}
    assert kept["none"] > 4 * kept["sqrt"] > 8 * kept["log"]


def test_places_moves_what_is_kept(tmp_path: Path) -> None:
    output = run(tmp_path, "07_places.py")
    on_disk, inputs_on_disk, in_slab = output.split("GPT2LMHeadModel")[2:]
    assert re.search(r"transformer\.h\.0-2 \(3x\) +keep \+ disk +\S+ MiB +\S+ KiB +\S+ MiB +0\n", on_disk)
    assert re.search(r"transformer\.h\.0-2 \(3x\) +full \+ disk +\S+ MiB +0 B +\S+ KiB +3\n", inputs_on_disk)
    assert re.search(r"transformer\.h\.0-2 \(3x\) +selective\(matmul\+ .*\n +attention\) \+ slab\n", in_slab)
    assert "the gradients are equal in every bit" in output


@pytest.mark.slow
def test_hf_trainer_peaks_lower_with_a_policy(tmp_path: Path) -> None:
    output = run(tmp_path, "06_hf_trainer.py")
    peaks = {name.strip(): float(peak) for name, peak in re.findall(r"^(.{22}) +([\d.]+) MiB", output, re.M)}
    assert peaks["full"] < peaks["selective"] < peaks["keep all"]
    assert peaks["full"] <= peaks["Transformers' own"]
    assert "the losses are equal in every bit" in output


def test_torchtitan_style_recomputes_every_second_layer(tmp_path: Path) -> None:
    output = run(tmp_path, "08_torchtitan_style.py")
    assert re.search(r"^layers\.0,2,\.\.,4 \(3x\) +full \+ disk ", output, re.M)
    assert re.search(r"^layers\.1,3,\.\.,5 \(3x\) +keep +\S+ [KM]iB ", output, re.M)


# ---- a model and a data set from outside of the package, by a config file of one's own

OWN_MODEL = [EXAMPLES / "04_own_model" / name for name in ("waves.py", "config.py")]
PAGE = EXAMPLES.parent / "docs" / "own_model.md"


def code_of(path: Path) -> str:
    """Returns a file without its docstring."""
    return path.read_text(encoding="utf-8").split('"""', 2)[2].strip()


def test_the_page_shows_the_files_of_an_own_model() -> None:
    page = PAGE.read_text(encoding="utf-8")
    shown = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert [block.strip() for block in shown[: len(OWN_MODEL)]] == [code_of(path) for path in OWN_MODEL]


def test_model_data_and_config_are_under_30_lines() -> None:
    lines = [line for path in OWN_MODEL for line in code_of(path).splitlines() if line.strip()]
    assert len(lines) < 30


@pytest.mark.slow
def test_an_own_model_learns_and_checkpoints_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_script("graphckpt", "train", "--config-file", str(OWN_MODEL[1]), "train.device=cpu", folder=tmp_path)
    assert done.code == 0, done.stderr
    assert re.search(r"model\.net\.1-4 \(4x\) +full", done.stdout)
    folder = tmp_path / "output" / "waves"
    rows = [json.loads(line) for line in (folder / "metrics.json").read_text(encoding="utf-8").splitlines()]
    assert rows[-1]["eval_mse_loss"] < 0.01
    assert (folder / "model_final" / "model.safetensors").is_file()
