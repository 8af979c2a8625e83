"""The core runs with torch and rich alone; what an extra installs is one line of error that names the command."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
import tomllib
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCKED = {
    "accelerate", "datasets", "huggingface_hub", "lightning", "matplotlib", "networkx", "numpy", "omegaconf", "peft",
    "plotly", "pyarrow", "pydantic", "pydantic_core", "pynvml", "safetensors", "scipy", "tensorboard", "tokenizers",
    "tqdm", "transformers", "wandb", "yaml",
}  # fmt: skip
BLOCK = f"""
import sys, warnings
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(BLOCKED)!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch's own
"""
USE = (ROOT / "tests" / "release" / "core_only.py").read_text(encoding="utf-8")


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCK + textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def missing(package: str, extra: str) -> str:
    """Returns the error; graphckpt is on no index, so that only a checkout knows its extras."""
    project = {"yaml": "pyyaml"}.get(package, package)
    fix = f"pip install {project}, or, in a checkout of graphckpt, pip install '.[{extra}]'"
    return f"{package} is not installed · fix: {fix}"


MISSING = [
    ("handle.explain('step.png', show=False)", "matplotlib", "plot"),
    ("handle.explain('step.html', show=False)", "plotly", "report"),
    ("handle.remove(); graphckpt.plan(model, lambda: model(x).sum().backward(), memory_budget=10**9)", "numpy", "plan"),
    ("graphckpt.Plan.load('plan.yaml')", "yaml", "plan"),
    ("graphckpt.estimate('model', device='h100')", "transformers", "estimate"),
    ("import graphckpt.train", "numpy", "train"),
    ("import graphckpt.config", "omegaconf", "train"),
    ("import graphckpt.integrations.transformers", "transformers", "transformers-trainer"),
    ("import graphckpt.integrations.lightning", "lightning", "lightning"),
]


def test_apply_and_explain_need_torch_and_rich_alone_and_a_missing_extra_is_one_line_with_the_command() -> None:
    """On the command line too. Rich draws from Python's generator when it is imported: a script that seeds sees it."""
    each = f"""
assert random.getstate() == state
for code in {[code for code, *_ in MISSING]!r}:
    try:
        exec(code)
    except graphckpt.GraphckptError as error:
        print("error:", error)
"""
    config = ["--config-file", "quickstart.py"]
    commands = [["train", *config], ["plan", *config, "--device", "h100"]]
    command_line = f"from graphckpt.cli import main\nsys.exit(str([main(words) for words in {commands!r}]))"
    done = run(f"import graphckpt, random\nrandom.seed(0)\nstate = random.getstate()\n{USE}{each}{command_line}")
    assert done.stderr == f"error: {missing('omegaconf', 'train')}\n" * 2 + "[2, 2]\n"
    assert "layers.0" in done.stdout
    assert [line for line in done.stdout.splitlines() if line.startswith("error")] == [
        f"error: {missing(package, extra)}" for _, package, extra in MISSING
    ]


def test_every_import_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = chain(project["dependencies"], *project["optional-dependencies"].values())
    declared = {line.partition(">")[0].partition("[")[0] for line in lines}
    named_otherwise = {
        "yaml": "pyyaml",
        "huggingface_hub": "huggingface-hub",
        "pynvml": "nvidia-ml-py",
        "pydantic_core": "pydantic-core",
    }
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "graphckpt").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    imported = {name.partition(".")[0] for name in names} - {*sys.stdlib_module_names, "graphckpt"}
    assert {named_otherwise.get(name, name) for name in imported} - declared == set()
    assert imported - {"torch", "rich", "filelock", "typing_extensions"} <= BLOCKED  # torch itself needs the last two
