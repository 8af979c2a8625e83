"""Installs the wheel into an environment of its own and uses it from elsewhere.

python tests/release/installed_wheel.py build/dist

The environment borrows what graphckpt needs from the one that runs this; graphckpt itself it has from the wheel.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

IN_WHEEL = (
    "graphckpt/py.typed",
    "graphckpt/configs/quickstart.py",
    "graphckpt/configs/common/train.py",
    "graphckpt/integrations/transformers.py",
)
IN_SDIST = (
    "configs/quickstart.py",
    "tests/conftest.py",
    "tests/helpers/runner.py",
    "docs/tutorial.md",
    "mkdocs.yml",
    "CHANGELOG.md",
    "SECURITY.md",
)
USE = """
import graphckpt
from graphckpt.cli import main
from graphckpt.config.files import find_packaged
assert "/work" in graphckpt.__file__, graphckpt.__file__
config = str(find_packaged("quickstart.py"))
print(config)
main(["train", "--config-file", config, "--help"])
"""


def main(folder: Path) -> None:
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert [name for name in IN_WHEEL if name not in names] == []
    tops = {name.split("/")[0] for name in names}
    assert tops == {"graphckpt", wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"}
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert [name for name in IN_SDIST if name not in inside] == []
    with tempfile.TemporaryDirectory() as elsewhere:
        place = Path(elsewhere) / "work"
        packages = environment_at(place)
        # searched last; the editable install there, a .pth file itself, has no force
        (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        install(wheel, place, "--no-deps", "--force-reinstall")
        config, _, usage = run([str(place / "bin" / "python"), "-c", USE], place).partition("\n")
        assert "--config-file" in usage
        output = run([str(place / "bin" / "graphckpt"), "train", "--config-file", config, "--fast-dev-run"], place)
        assert "iteration: 3/3" in output, output
        bare(wheel, Path(elsewhere) / "bare")
    print(f"{wheel.name}: installed, used without extras, and trained with the config that it carries")


def bare(wheel: Path, place: Path) -> None:
    """Installs the wheel without extras: beside it there are torch, rich and what they need, and nothing else."""
    packages = environment_at(place)
    for name in needed("torch", "rich"):
        found = distribution(name)
        for top in {path.parts[0] for path in found.files or () if path.parts[0] not in {"..", "__pycache__"}}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(found.locate_file(top))))
    install(wheel, place)
    python = str(place / "bin" / "python")
    code = "import importlib.util as u; print([n for n in ('numpy', 'yaml', 'transformers') if u.find_spec(n)])"
    assert run([python, "-c", code], place) == "[]\n"
    output = run([python, "-W", "ignore", str(Path(__file__).with_name("core_only.py"))], place)
    assert "layers.0" in output, output


def environment_at(place: Path) -> Path:
    """Makes an environment, and returns where its packages are."""
    venv.create(place, with_pip=False)
    return next(place.glob("lib/python*/site-packages"))


def install(wheel: Path, place: Path, *options: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(place), "--disable-pip-version-check", "install", "--quiet"]
    run([*pip, "--no-index", *options, str(wheel.resolve())], place)


def needed(*names: str) -> set[str]:
    """Returns distributions with all that they require, by the marker-free part of their metadata."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        try:
            requires = distribution(name).requires or []
        except PackageNotFoundError:  # of another system
            continue
        if name not in found:
            found.add(name)
            waiting += [re.match(r"[\w.-]+", text)[0] for text in requires if "extra ==" not in text]
    return found


def run(command: list[str], folder: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]))
