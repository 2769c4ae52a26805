"""The example plugin is installed by pip and used through Ingot's Python interface and command line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ingot

pytest.importorskip("setuptools")
pytestmark = pytest.mark.slow  # pip, and a process per case
SOURCE = Path(__file__).resolve().parent
FILES = ("pyproject.toml", "ingot_example")
MODULES = {path.name for path in (SOURCE / "ingot_example").glob("*.py")}

LIBRARY = """
import sys
import ingot

assert not [name for name in sys.modules if name.startswith("ingot_example")]
report = ingot.convert("model.safetensors", "fixed.zt", recipe="fixed.toml")
assert {tensor.codec for tensor in report.tensors} == {"fixed16"}
assert not [finding for finding in ingot.verify("fixed.zt") if finding.level == "error"]
with ingot.open("fixed.zt") as checkpoint:
    ingot.save("back.flat", {name: tensor.numpy() for name, tensor in checkpoint.items()})
findings = ingot.verify("back.flat", runtime="flatrun")
assert [finding.rule for finding in findings if "Flatrun 1.0 would load" in finding.message] == ["runtime.loads"]
assert "ingot_example.command" not in sys.modules
"""


def run(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(filter(None, (str(installed), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": paths, "COLUMNS": "80"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pip installed the plugin in."""
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(SOURCE, folder / "source", ignore=lambda _, names: set(names) - {*FILES, *MODULES})
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    options = ["--no-deps", "--no-build-isolation", "--target", str(folder / "installed"), str(folder / "source")]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "installed"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    values = np.linspace(-0.9, 0.9, 256, dtype=np.float32).reshape(16, 16)
    ingot.save(tmp_path / "model.safetensors", {"model.layers.0.mlp.up_proj.weight": values})
    (tmp_path / "fixed.toml").write_text('[[rules]]\ncodec = "fixed16"\noptions = { exponent = -15 }\n')
    return tmp_path


def test_codec_and_format_serve_the_python_interface(installed: Path, folder: Path) -> None:
    done = run(installed, folder, "-c", LIBRARY)
    assert done.returncode == 0, done.stderr
    (folder / "read.py").write_text(
        "import sys, ingot, numpy\n"
        "with ingot.open('back.flat') as back, ingot.open('model.safetensors') as model:\n"
        "    assert back.format == 'flat'\n"
        "    for name in model: assert abs(back[name].numpy() - model[name].numpy()).max() <= 2**-16\n"
    )
    done = run(installed, folder, "read.py")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--help",), "Plugins  largest    ingot-example 1.0: A codec, a format and a command for Ingot"),
        (("formats",), ".flat"),
        (("codecs",), "fixed16"),
        (("matrix", "model.safetensors"), "flat"),
        (("convert", "model.safetensors", "out.flat"), "out.flat"),
        (("largest", "model.safetensors", "--count", "1"), "1,024 dense        model.layers.0.mlp.up_proj.weight"),
        (("largest", "--help"), "CHECKPOINT is a file, a folder or an address."),
        (("larges",), "largest"),
    ],
)
def test_command_line_lists_and_uses_the_entries(
    installed: Path, folder: Path, words: tuple[str, ...], expected: str
) -> None:
    done = run(installed, folder, "-m", "ingot", *words)
    assert done.returncode == (2 if words == ("larges",) else 0), done.stderr
    assert expected in done.stdout + done.stderr


@pytest.mark.parametrize("words", [("--version",), ("--help",), ("inspect", "model.safetensors"), ("inspect", "a.zt")])
def test_plugin_code_is_imported_only_for_its_entries(installed: Path, folder: Path, words: tuple[str, ...]) -> None:
    ingot.save(folder / "a.zt", {"w": np.ones(3, np.float32)})
    code = (
        "import sys\n"
        "from ingot.cli.main import run\n"
        "assert run(sys.argv[1:]) == 0\n"
        "assert not [name for name in sys.modules if name.startswith('ingot_example')]\n"
    )
    done = run(installed, folder, "-c", code, *words)
    assert done.returncode == 0, done.stderr
