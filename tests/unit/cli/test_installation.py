"""What an installation says and does where optional packages are missing, and what pyproject.toml asks pip for."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ingot
from ingot.codecs.table import CODECS
from ingot.conversion.run import prepare
from ingot.errors import DISTRIBUTION, MissingExtraError
from ingot.inspect.doctor import EXTRAS, examine

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
DECLARED = PROJECT["project"]["optional-dependencies"]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def requirements(*arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "requirements.py"), *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def versions(lines: list[str], separator: str) -> dict[str, tuple[int, ...]]:
    """Package names (without their extras) and versions."""
    split = [re.sub(r"\[\w+\]|;.*", "", line).strip().partition(separator) for line in lines]
    return {name: tuple(map(int, version.split("."))) for name, _, version in split if version}


def asked_extras() -> Iterator[tuple[Path, str, str]]:
    """Every call ``require(module, extra)`` of the package: its file, the module, the extra."""
    for path in SOURCES:
        tree = ast.parse(path.read_text("utf-8"))
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "require" and len(call.args) == 2:
                module, extra = call.args
                known = extra.value if isinstance(extra, ast.Constant) else constant(tree, ast.unparse(extra))
                if known is not None:
                    yield path, ast.unparse(module), known


def constant(tree: ast.Module, name: str) -> str | None:
    """What a module sets a name to; None for one that it imports, whose own module is asked."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            assert isinstance(node.value, ast.Constant)
            return str(node.value.value)
        if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
            assert node.module is not None
            return constant(ast.parse(module_path(node.module).read_text("utf-8")), name)
    return None


def module_path(name: str) -> Path:
    return (ROOT / "src").joinpath(*name.split(".")).with_suffix(".py")


def test_every_hint_names_a_distribution_and_an_extra_that_are_declared() -> None:
    assert PROJECT["project"]["name"] == DISTRIBUTION == ingot.__name__
    asked = list(asked_extras())
    assert len(asked) > 20
    for path, module, extra in asked:
        assert extra in DECLARED, f"{path}: {module} is asked for with extra {extra}"
    assert set(EXTRAS) == set(DECLARED)
    for extra, (package, _) in EXTRAS.items():
        assert any(re.match(rf"{re.escape(package)}\b", line) for line in DECLARED[extra]), package
    told = [check.advice for check in examine()] + [str(MissingExtraError("package", "torch"))]
    pages = [*SOURCES, *ROOT.glob("*.md"), *(ROOT / "spec").glob("*.md"), *(ROOT / "examples").glob("*.*")]
    told += [path.read_text("utf-8") for path in [*pages, *(ROOT / "tests" / "fuzz").glob("*.py")]]
    hints = [hint for text in told for hint in re.findall(r"pip install '([\w.-]+)\[([\w,]+)\]'", text)]
    assert hints
    for name, extras in hints:
        if name != "mlx":
            assert name in (DISTRIBUTION, "."), name
            assert set(extras.split(",")) <= set(DECLARED), extras


def test_helps_and_listings_need_no_optional_package() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "core_tour.py"), "--block", "--no-tour"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_few_calls_need_is_imported_by_them_alone(tmp_path: Path) -> None:
    ingot.save(tmp_path / "a.zt", {"w": np.ones(3, np.float32)})
    code = (
        "import sys, ingot\n"
        "from ingot.cli.main import run\n"
        "assert 'numpy' not in sys.modules, 'options and reports of commands are light'\n"
        "with ingot.open(sys.argv[1]) as checkpoint: checkpoint['w'].numpy()\n"
        "run(['--help'])\n"
        "late = {'psutil', 'platformdirs', 'tomli_w', 'huggingface_hub', 'torch', 'transformers'} & set(sys.modules)\n"
        "assert not late, late"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.zt")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# What no listing of a file of one format needs: another format, what locks and writes, what draws progress.
NEVER = (
    "asyncio", "filelock", "psutil", "tomllib", "tqdm", "ml_dtypes", "huggingface_hub", "torch",
    "ingot.cli.convert", "ingot.ext.ane.cli.plan", "ingot.conversion", "ingot.delta", "ingot.engine.execute",
    "ingot.recipes", "ingot.formats.packed_folders", "ingot.ext.squish", "ingot.formats.onnx", "ingot.formats.coreml",
)  # fmt: skip


@pytest.mark.parametrize(
    ("words", "never"),
    [
        (
            ["--version"],
            (*NEVER, "numpy", "ingot.model", "ingot.formats", "ingot.artifacts", "ingot.conversion", "ingot.stores"),
        ),
        (["inspect", "a.zt"], (*NEVER, "ingot.formats.zt2", "ingot.formats.gguf", "ingot.ext.squizd")),
        (["inspect", "a.gguf"], (*NEVER, "ingot.formats.zt", "ingot.formats.zt2", "ingot.ext.squizd")),
    ],
)
def test_a_command_imports_what_it_needs(tmp_path: Path, words: list[str], never: tuple[str, ...]) -> None:
    for name in words[1:]:
        ingot.save(tmp_path / name, {"w": np.ones((2, 32), np.float32)})
    code = (
        "import sys\n"
        "from ingot.cli.main import run\n"
        "assert run(sys.argv[2:]) == 0\n"
        "never = sys.argv[1].split(',')\n"
        "found = {name for name in sys.modules if any(name == each or name.startswith(each + '.') for each in never)}\n"
        "assert not found, found"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, ",".join(never), *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("codec", "options"),
    [
        ("astc", {}),
        ("with_outliers", {"inner": "astc"}),
        ("sparse_blocks", {"axis": 0, "block": 1, "mask": b"\xff", "inner": "astc"}),
    ],
)
def test_an_encoder_is_planned_without_its_package_and_refused_before_it_runs(monkeypatch, codec, options) -> None:
    monkeypatch.setitem(sys.modules, "astc_encoder", None)
    encoder = CODECS[codec].encoder((8, 16), "f32", options)
    assert encoder.parts
    with pytest.raises(MissingExtraError):
        encoder.ready()


def test_a_conversion_asks_for_packages_before_it_begins(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "astc_encoder", None)
    weights = {"model.layers.0.mlp.up_proj.weight": np.ones((64, 64), np.float32)}
    ingot.save(tmp_path / "a.safetensors", weights)
    with prepare(tmp_path / "a.safetensors", tmp_path / "b.zt", "astc", None) as prepared:
        assert [step.spec.codec for step in prepared.plan.steps] == ["astc"]
    seen: list[int] = []
    with pytest.raises(MissingExtraError) as caught:
        ingot.convert(
            tmp_path / "a.safetensors", tmp_path / "b.zt", recipe="astc", progress=lambda event: seen.append(1)
        )
    assert caught.value.extra == "astc"
    assert not seen
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_what_is_tested_is_what_is_allowed() -> None:
    """Pins of the tests are not below the extras' lower bounds, and minimum pins are these bounds."""
    lowest = versions(requirements("--minimum", "core", *DECLARED), "==")
    pinned = versions(requirements("test"), "==")
    assert {"torch", "transformers", "mlx", "mlx-lm", "lm-eval", "astc-encoder-py"} <= set(lowest) & set(pinned)
    assert all(pinned[name] >= lowest[name] for name in set(lowest) & set(pinned))
    bounds = versions([line for lines in DECLARED.values() for line in lines], ">=")
    assert all(lowest[name] == version for name, version in bounds.items())
    assert "torch==2.13.0" in requirements("--minimum", "torch", "--but", "torch==2.13.0")


def test_ingot_is_built_with_what_the_group_build_brings() -> None:
    assert set(PROJECT["build-system"]["requires"]) <= set(requirements("build"))


# What `pip install ingot` brings besides Ingot. A new name is a decision: it is downloaded by every user.
CLOSURE = {
    "backports-zstd", "blake3", "click", "filelock", "ml-dtypes", "msgspec", "numpy", "platformdirs", "psutil",
    "tomli-w", "tqdm", "typing-extensions", "xxhash",
}  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="other systems need other packages")
def test_an_installation_brings_the_packages_that_are_listed() -> None:
    names: set[str] = set()
    waiting = [*PROJECT["project"]["dependencies"]]
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        if name in names or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        names.add(name)
        waiting += metadata.requires(name) or ()
    assert names <= CLOSURE
    assert CLOSURE - names <= {"backports-zstd", "typing-extensions"}  # newer versions of Python need neither
