"""Each recipe trains with and without policies: the peak falls, and losses, weights and buffers stay the same."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from helpers.subprocess_runner import run_script
from transformers import ViTConfig, ViTForImageClassification

from graphckpt.units import parse_bytes

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "examples" / "recipes"
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
RECIPES = ["bert_classification", "long_gpt2", "lora_llama", "resnet101", "vit"]
MIB = 2**20
EQUAL = "losses, weights and buffers: bitwise equal"
SIZE = r"[\d.]+ [KMG]?i?B"


def run(folder: Path, recipe: str, *words: str) -> str:
    done = run_script(FOLDER / f"{recipe}.py", *words, folder=folder)
    assert done.code == 0, done.stderr
    return done.stdout


def peaks(output: str) -> dict[str, int]:
    """Returns the measured peaks in bytes by the name of the policy."""
    table = output[output.rindex("\n---") :]
    return {name: parse_bytes(size) for name, size in re.findall(rf"^(\S.*?)  .*?({SIZE})", table, re.MULTILINE)}


def assert_shown(output: str, recipe: str, *names: str) -> None:
    """Asserts that the page shows the measured peaks of these policies, which do not depend on measured times."""
    shown = re.search(rf"```console\n\$ python examples/recipes/{recipe}\.py\n```\n\n```text\n(.*?)```", PAGE, re.S)
    assert shown is not None
    assert {name: peaks(output)[name] for name in names} == {name: peaks(shown[1])[name] for name in names}


def test_each_recipe_is_here() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.py")) == sorted([*RECIPES, "comparison"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_help_names_the_commands_and_the_flags(recipe: str, tmp_path: Path) -> None:
    text = run(tmp_path, recipe, "--help")
    assert f"python examples/recipes/{recipe}.py --size full " in text
    for flag in ("--size", "--memory-budget", "--model NAME", "--steps", "--predict DEVICE", "--deterministic"):
        assert flag in text
    assert f"python examples/recipes/{recipe}.py --size full" in PAGE


def test_vit(tmp_path: Path) -> None:
    output = run(tmp_path, "vit", "--steps=3")
    found = peaks(output)
    assert found["full"] < found["selective"] < found["everything kept"]
    assert found["full"] <= found["plan for 32.4MiB"] < found["everything kept"]
    assert EQUAL in output
    assert_shown(output, "vit", "everything kept", "selective", "full")


@pytest.mark.slow
def test_lora_llama_needs_no_gradient_of_the_inputs(tmp_path: Path) -> None:
    output = run(tmp_path, "lora_llama", "--steps=3")
    found = peaks(output)
    planned = found["GraphckptCallback(memory_budget='16.3MiB')"]
    assert found["GraphckptCallback('full')"] <= found["Transformers' own"] < found["everything kept"] / 2
    predicted = re.search(rf"graphckpt: planned .*; predicted peak ({SIZE})", output)
    assert predicted is not None
    assert planned == pytest.approx(parse_bytes(predicted[1]), rel=0.02)
    assert planned < 0.6 * found["everything kept"]
    assert EQUAL in output
    assert_shown(output, "lora_llama", "everything kept", "Transformers' own", "GraphckptCallback('full')")


@pytest.mark.slow
def test_bert_classification_trains_larger_batches_within_the_budget(tmp_path: Path) -> None:
    output = run(tmp_path, "bert_classification", "--steps=3", "--batch-sizes", "2", "4", "--memory-budget=34MiB")
    rows = re.findall(rf"^ +(\d+) +({SIZE}) +\S+ +({SIZE}) +\S+$", output, re.MULTILINE)
    assert [row[0] for row in rows] == ["2", "4"]
    kept, planned = ([parse_bytes(row[column]) for row in rows] for column in (1, 2))
    assert planned[0] == kept[0] <= 34 * MIB < kept[1]
    assert planned[1] <= 34 * MIB
    assert output.count(EQUAL) == 1


@pytest.mark.slow
def test_long_gpt2_trains_longer_sequences_within_the_budget(tmp_path: Path) -> None:
    output = run(tmp_path, "long_gpt2", "--steps=3", "--memory-budget=40MiB", "--tiles=4")
    rows = dict(re.findall(rf"^(everything kept|full|with a plan) +(\d+) +{SIZE} ", output, re.MULTILINE))
    assert int(rows["with a plan"]) >= 3 * int(rows["everything kept"]) == 3 * int(rows["full"])
    found = peaks(output)
    assert found["full"] < found["everything kept"] <= 40 * MIB
    assert found["with a plan"] <= 40 * MIB
    assert EQUAL in output


@pytest.mark.slow
def test_resnet101_updates_the_buffers_of_batch_norm_once(tmp_path: Path) -> None:
    output = run(tmp_path, "resnet101", "--steps=3")
    found = peaks(output)
    assert found["full"] < found["plan for 21.2MiB"] < found["everything kept"]
    assert EQUAL in output
    assert_shown(output, "resnet101", "everything kept", "full")


@pytest.mark.slow
def test_a_model_is_loaded_by_its_name(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "image_size": 16, "patch_size": 8}
    config = ViTConfig(num_hidden_layers=2, num_attention_heads=2, **sizes)
    ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    output = run(tmp_path, "vit", "--steps=3", "--model", str(tmp_path / "vit"), "--memory-budget=min")
    assert max(peaks(output).values()) < 2 * MIB, "random weights of the usual size take more"
    assert EQUAL in output


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    words = ("--predict=h100", "--batch-sizes", "8", "--memory-budget=100MiB")
    output = run(tmp_path, "bert_classification", *words)
    assert "memory budget 100 MiB on h100" in output
    row = re.search(rf"^ +8 +({SIZE}) +({SIZE}) +({SIZE})", output, re.MULTILINE)
    assert row is not None
    assert parse_bytes(row[1]) <= 100 * MIB < parse_bytes(row[3])


def test_results_that_differ_are_not_called_equal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import comparison  # noqa: PLC0415

    monkeypatch.delitem(sys.modules, "comparison")
    first = comparison.Result("kept", 2 * MIB, 0.5, (1.0, 0.5), "a")
    comparison.show([first, comparison.Result("other", MIB, 0.5, (1.0, 0.5), "b")], samples=4)
    printed = capsys.readouterr().out
    assert "losses or weights differ: other" in printed
    assert EQUAL not in printed
    comparison.show([first, comparison.Result("same", MIB, 0.25, (1.0, 0.5), "a")], samples=4)
    printed = capsys.readouterr().out
    assert EQUAL in printed
    assert re.search(r"^same +1\.00 MiB +250 ms +16 +0\.500000$", printed, re.MULTILINE)
