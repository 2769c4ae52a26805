"""Examples in public docstrings: every name of the site has one, and it prints what it shows."""

from __future__ import annotations

import doctest
import inspect
import json
import re
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from tests.support.drafts import draft_head
from tests.support.paths import DEMO_DATA
from tests.support.registry import FakeRegistry

API = Path(__file__).resolve().parents[3] / "docs" / "site" / "api.rst"
NEEDS = {
    "ingot.torch": "torch",
    "ingot.mlx": "mlx_lm",
    "ingot.load": "transformers",
    "ingot.calibrate": "transformers",
    "ingot.evaluate": "transformers",
    "ingot.sweep": "transformers",
}
SLOW = (
    "ingot.calibrate",
    "ingot.evaluate",
    "ingot.sweep",
    "ingot.execute",
    "ingot.load",
    "ingot.mlx",
    "ingot.quantize",
)


def public_names() -> list[str]:
    """Return the names that the page of the Python interface has; of ``ingot.errors`` the base class alone."""
    text = API.read_text("utf-8")
    names = re.findall(r"^\.\. auto(?:function|class):: (ingot\.\w+)$", text, re.MULTILINE)
    for module in re.findall(r"^\.\. automodule:: (ingot\.\w+)$", text, re.MULTILINE):
        if module != "ingot.errors":
            names += [f"{module}.{name}" for name in import_module(module).__all__]
    return [*names, "ingot.IngotError"]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the examples name."""
    folder = tmp_path_factory.mktemp("examples")
    shutil.copytree(DEMO_DATA, folder / "model", ignore=shutil.ignore_patterns("__*"))
    ingot.convert(folder / "model", folder / "int4.zt", recipe="int4")
    ingot.convert(folder / "model", folder / "int4", recipe="int4")
    weights = ingot.numpy.load_file(folder / "model")
    weights["model.norm.weight"] *= 2
    ingot.numpy.save_file(weights, folder / "tuned.safetensors")
    random = np.random.default_rng(0)
    factors: dict[str, Any] = {}
    for name, values in weights.items():
        if name.endswith("q_proj.weight"):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            factors[f"{module}.lora_A.weight"] = random.normal(0, 0.1, (4, values.shape[1])).astype("f4")
            factors[f"{module}.lora_B.weight"] = random.normal(0, 0.1, (values.shape[0], 4)).astype("f4")
    (folder / "style").mkdir()
    ingot.numpy.save_file(factors, folder / "style" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "style" / "adapter_config.json").write_text(json.dumps(config))
    ingot.save(folder / "head.safetensors", draft_head())
    return folder


def run_examples(name: str) -> None:
    """Run the examples of a public name; a registry of the tests stands for that at localhost:5000."""
    module, _, attribute = name.rpartition(".")
    item = inspect.unwrap(getattr(import_module(module), attribute))
    finder = doctest.DocTestFinder(recurse=False)
    tests = finder.find(item, name, module=False, globs={"ingot": ingot, "np": np})
    examples = [example for test in tests for example in test.examples]
    assert examples, f"{name} has no example"
    runner = doctest.DocTestRunner(verbose=False)
    lines: list[str] = []
    with FakeRegistry() as registry:
        for example in examples:
            example.source = example.source.replace("localhost:5000", registry.host)
        for test in tests:
            runner.run(test, out=lines.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(lines)


def enter(prepared: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for prefix, package in NEEDS.items():
        if name.startswith(prefix):
            pytest.importorskip(package)
    shutil.copytree(prepared, folder / "work")
    monkeypatch.chdir(folder / "work")


@pytest.mark.parametrize("name", [name for name in public_names() if not name.startswith(SLOW)])
def test_an_example_prints_what_it_shows(
    name: str, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(prepared, tmp_path, monkeypatch, name)
    run_examples(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in public_names() if name.startswith(SLOW)])
def test_a_long_example_prints_what_it_shows(
    name: str, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(prepared, tmp_path, monkeypatch, name)
    run_examples(name)
