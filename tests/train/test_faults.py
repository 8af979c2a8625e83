"""A value that cannot be used is one error that names its key, whatever the key and the value; never a traceback."""

from __future__ import annotations

import os
import random
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from helpers.small_run import CONFIG, train
from omegaconf import OmegaConf
from transformers import GPT2Config

from graphckpt.cli import main
from graphckpt.config import LazyConfig
from graphckpt.config.lazy import parameters
from graphckpt.train.settings import TrainConfig

pytestmark = pytest.mark.usefixtures("place")

BRIEF = ["train.train_iter=2", "train.overwrite=True", "train.evaluation.eval_iter=1", "train.checkpointer.period=1"]
NUM_CASES = int(os.environ.get("GRAPHCKPT_FUZZ_CASES", "60"))
SECONDS = 60
_MODULE = "_target_: torch.nn.Linear, in_features: 2, out_features: 2"
VALUES = [
    *("-1", "0", "1", "2", "3.5", "-0.5", "1e30", "-1e30", ".nan", ".inf", "-.inf", "1" + "0" * 400),
    *("null", "true", "false", "''", "text", "'1'", "12:30:45", "1:30.5", "010", "0x10", "'a: b'", "é"),
    *("[]", "[1, 2]", "{}", "{a: 1}", "[[1], {a: 2}]", f"{{{_MODULE}}}", "{_target_: builtins.int}"),
    *("{_target_: nowhere.at.all}", "{_target_: 5}", "{_target_: null}", "{_target_: ''}", "{_target_: torch}"),
    *("${nowhere}", "${train.seed}", "???", "cpu", "float16", "torch.nn.Linear", "/dev/null/x"),
]


def keys() -> list[str]:
    """The keys of the config, of the section ``train``, of the model and of the optimizer; also of whole sections."""
    found = {"task", "task.loss_head", "task._target_", "import_from"}

    def walk(node: object, key: str) -> None:
        found.add(key)
        for name, value in node.items() if isinstance(node, dict) else ():
            walk(value, f"{key}.{name}")

    for name, section in OmegaConf.to_container(LazyConfig.load("tiny.py"), resolve=True).items():
        walk(section, name)
    walk(asdict(TrainConfig()), "train")
    found |= {f"model.config.{name}" for name in parameters(GPT2Config)[0]}
    found |= {f"optim.{name}" for name in parameters(torch.optim.AdamW)[0]}
    return sorted(found)


def is_long(key: str, value: str) -> bool:
    """Whether a run does what it says, for very long."""
    return key in {"train.train_iter", "train.train_epoch", "train.train_samples"} and value in {"1e30", "0x10"}


def one_error(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Returns what the command line says, which must not be the end of a traceback or of patience."""

    def late(*_: object) -> None:
        raise TimeoutError(f"{words}: no end within {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        code = train(*BRIEF, *words)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    error = capsys.readouterr().err
    if code == 0:
        return ""
    assert code == 2, (words, error)
    first, *more = error.splitlines()
    assert first.startswith("error: "), (words, error)
    assert not more or all(line.startswith(("  •", "data: ")) for line in more), (words, error)
    return error


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_random_values_of_random_keys(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known, refused = keys(), 0
    for seed in range(NUM_CASES):
        generator = random.Random(seed)
        key, value = generator.choice(known), generator.choice(VALUES)
        if not is_long(key, value):
            refused += bool(one_error(capsys, f"{key}={value}"))
    assert NUM_CASES // 3 < refused < NUM_CASES


_CHECKPOINT = "train.activation_checkpoint"
_BUDGET = f"{_CHECKPOINT}.memory_budget"
_HEAD = f"{_CHECKPOINT}.head"
_SLICED = f'{_HEAD}={{"loss_head": {{"rule": "tiles", "num_tiles": 4, "reduce": "sum"}}}}'


@pytest.mark.parametrize(
    ("word", "fault"),
    [
        (f"optim.params.weight_decay_bias={{{_MODULE}}}", "expected float, got"),
        ("train.train_iter={_target_: builtins.int}", "expected int, got a call of 'builtins.int'"),
        ("train.amp={_target_: builtins.dict}", "expected a section, got a call of 'builtins.dict'"),
        ("train.train_samples=12:30:45", "expected a plain number, got 12:30:45 · fix: write it in digits"),
        ("train.seed=1e30", "expected int, got 1e+30 (float)"),
        (f"train.seed={2**63}", "expected less than 2**63, got 9223372036854775808"),
        (f"optim.lr={10**400}", "expected "),
        ("optim.lr=.inf", "expected a finite number, got inf"),
        ("optim.weight_decay=.nan", "expected a number, got nan"),
        ("train.train_epoch=.inf", "expected a finite number, got inf"),
        ("model.config.n_head=-1", "expected 1 or more, got -1"),
        ("model.config.num_hidden_layers=-2", "expected 1 or more, got -2"),
        ("train.checkpointer.period=0", "expected 1 or more, got 0"),
        ("train.dist.timeout_seconds=1e18", "expected 1000000000 or less, got 1e+18"),
        ("train.capture=cudagraph", "expected 'auto', 'cuda_graph' or 'eager', got 'cudagraph' (str) · did you mean"),
        ("train.device=meta", "expected a device that can train, got 'meta'"),
        ("train.device=cuda:99", "'cuda:99' cannot be used"),
        ("train.output_dir=tiny.py", "tiny.py: File exists · fix: name a folder"),
        ('train.output_dir="a\\0b"', r"expected text without null characters, got 'a\x00b'"),
        ('import_from="a\\0b"', r"expected text without null characters, got 'a\x00b'"),
        ("import_from=3", "expected str, got 3 (int)"),
        ("train.tensorboard=True", "the package tensorboard is not installed · fix: pip install"),
        (f"{_BUDGET}=150%", "expected more than 0% and at most 100% of the device's memory, got '150%'"),
        (_SLICED, "no memory_budget is set to plan it for"),
    ],
)
def test_the_key_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, word: str, fault: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert f"{word.partition('=')[0]}: {fault}" in one_error(capsys, word)


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (
            ["trian.seed=1", "train.seed=x"],
            ["error: command line: 2 errors", "• trian: no such key · did you", "• train.seed: expected int"],
        ),
        (
            ["optim.learning_rate=1"],
            ["command line: 1 error", "optim.learning_rate: no such key of AdamW · did you mean 'lr'?"],
        ),
        (["train.seed.x=1"], ["train.seed: expected int, got {'x': 1} (dict)"]),
        (["model.config.n_layer.x=1"], ["model.config.n_layer: expected int, got {'x': 1} (dict)"]),
        (["data.paths=[texts, 3]"], ["data.paths[1]: expected str, got 3 (int)"]),
        (["optim.betas=[0.9, 12:30]"], ["optim.betas[1]: expected a plain number, got 12:30"]),
        (["model.config.n_embd=33"], ["model: error in call to 'transformers", "divisible"]),
        (["model.config.vocab_size=100"], ["a vocabulary of at least the tokenizer's", "${data.vocab_size}"]),
        (["optim.params.clip_grad_max_norm=-1"], ["optim.params: error in call to"]),
        (["optim._target_=builtins.dict"], ["optim"]),
        (['optim._target_="a\\0.b"'], ["optim"]),
        (["optim.lr=1e6", "train.train_iter=8"], ["the loss is", "fix: lower optim.lr"]),
        (["train.scheduler._target_=builtins.dict"], ["optim, train.scheduler: TrainGraph"]),
        (["train.capture=cuda_graph"], ["'cuda_graph' expected modules on one CUDA device, got cpu"]),
        (['data.paths=["a\\0b"]'], [r"data.paths[0]: expected text without null characters, got 'a\x00b'"]),
        (
            ["--resume", "train.overwrite=False"],
            ["out holds no last_checkpoint, so there is nothing to resume · fix: "],
        ),
        (["--eval-only"], ["nothing to evaluate: "]),
        (["train.load_weight=texts"], ["texts: has no model.safetensors"]),
        (["train.wandb.enabled=True"], ["train.wandb: the package wandb is not installed · fix: pip install"]),
        ([f"{_CHECKPOINT}.enabled=True", f"{_CHECKPOINT}.rule=selectiv"], ["activation_checkpointing: ", "selective'"]),
        ([f"{_BUDGET}=min", f"{_CHECKPOINT}.compile=fast"], ["compile: expected bool or a mapping, got"]),
        ([f"{_BUDGET}=min", f"{_CHECKPOINT}.host_budget=12G"], ["host_budget: '12G': unknown unit 'G'"]),
        ([f"{_BUDGET}=1KiB"], ["no plan fits"]),
        (
            [f"{_BUDGET}=min", f"{_CHECKPOINT}.policies={{h.0: true}}"],
            ["expected no policies with it, as a plan chooses them"],
        ),
        ([f"{_BUDGET}=min", f'{_HEAD}={{"loss_head": "tlies"}}'], ["head.loss_head: expected a rule, got 'tlies'"]),
        ([f"{_BUDGET}=min", _SLICED], ["'loss_head' · did you mean 'lm_head'? · fix: task.loss_head=True"]),
        (
            [f"{_CHECKPOINT}.enabled=True", f'{_CHECKPOINT}.policies={{"transformer.g.*": {{}}, "x": {{}}}}'],
            ["policies: 'transformer.g.*' matches no module", "policies: 'x' matches no module"],
        ),
        (
            [
                f"{_CHECKPOINT}.enabled=True",
                f"{_CHECKPOINT}.policies={{transformer.h.0: {{activation_checkpoint: 1}}}}",
            ],
            ["did you mean 'activation_checkpointing'"],
        ),
    ],
)
def test_an_error_names_every_fault(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    messages: list[str],
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    error = one_error(capsys, *words)
    assert all(message in error for message in messages), error


def test_a_model_that_fails_in_its_first_forward_is_named_with_the_line(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "broken_model.py").write_text(
        "import transformers\n\n\nclass Broken(transformers.GPT2LMHeadModel):\n"
        "    def forward(self, *args, **kwargs):\n        return self.no_such_part\n"
    )
    error = one_error(capsys, "model._target_=broken_model.Broken")
    what = "iteration 1 failed, AttributeError: 'Broken' object has no attribute 'no_such_part' (at "
    assert f"error: model, task, data, optim, train.scheduler: {what}" in error
    assert not (place / "out").exists()


def test_data_that_fails_is_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "broken_data.py").write_text(
        "class Broken:\n    def __init__(self, **_):\n        pass\n\n    def open(self, task, *, seed, report):\n"
        "        return {}['nothing']\n"
    )
    error = one_error(capsys, "data._target_=broken_data.Broken")
    assert "error: data: opening it failed, KeyError: 'nothing' (at " in error
    assert "broken_data.py:6) · fix: check these keys of the config" in error


def test_a_sample_that_raises_stop_iteration_is_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Python gives it a meaning of its own in generators, which contexts are made of."""
    (place / "ends.py").write_text(
        "import torch\n\n\nclass Ends(list):\n    def __getitem__(self, index):\n        raise StopIteration('end')\n"
        "\n\ndef data():\n    from graphckpt.train import OwnData\n    return OwnData(train=Ends([1, 2]))\n"
    )
    (place / "tiny.py").write_text(
        f"{CONFIG}\nfrom graphckpt.config import LazyCall\nfrom graphckpt.train import OwnLoss\n"
        "data = {'_target_': 'ends.data'}\ntask = LazyCall(OwnLoss)()\n"
        "model.config.update(vocab_size=9, n_positions=9)\n"
    )
    error = one_error(capsys)
    assert "error: model, task, data, optim, train.scheduler: iteration 1 failed, StopIteration: end (at " in error


def test_a_yaml_file_with_a_number_in_base_60_names_key_and_line(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "odd.yaml").write_text("train:\n  train_samples: 12:30:45\n  output_dir: '12:30'\n  seed: 007\n")
    assert main(["train", "--config-file", "odd.yaml"]) == 2
    fix = "fix: write it in digits, without ':' and without a zero in front, or quote it"
    assert capsys.readouterr().err.splitlines() == [
        "error: odd.yaml:",
        f"  • train.train_samples in line 2: expected a plain number, got 12:30:45 · {fix}",
        f"  • train.seed in line 4: expected a plain number, got 007 · {fix}",
    ]
