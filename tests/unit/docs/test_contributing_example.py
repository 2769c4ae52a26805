"""The codec that CONTRIBUTING.md shows passes the suite, and a recipe can use it once it is in the table."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import ingot
from ingot.codecs.base import Codec, Encoder
from ingot.codecs.table import CODECS
from ingot.formats.base import Format

PAGE = Path(__file__).resolve().parents[3] / "CONTRIBUTING.md"


def _example() -> ModuleType:
    text = PAGE.read_text("utf-8").partition("## A codec in an hour")[2].partition("\n```python\n")[2]
    code = text.partition("\n```\n")[0]
    module = ModuleType("contributing_example")
    sys.modules[module.__name__] = module
    exec(compile(code, str(PAGE), "exec"), module.__dict__)
    return module


EXAMPLE = _example()
TestFixed8 = EXAMPLE.TestFixed8  # collected and run like any other


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for the line in codecs/table.py."""
    monkeypatch.setattr(CODECS, "_paths", {**CODECS._paths, "fixed8": "contributing_example:Fixed8Codec"})
    monkeypatch.setattr(CODECS, "_loaded", dict(CODECS._loaded))


@pytest.mark.usefixtures("registered")
def test_a_recipe_can_use_it(tmp_path: Path) -> None:
    weights = {"layers.0.mlp.up_proj.weight": np.linspace(-0.4, 0.4, 64, dtype=np.float32).reshape(8, 8)}
    ingot.save(tmp_path / "model.safetensors", weights)
    recipe = tmp_path / "fixed.toml"
    recipe.write_text('[[rules]]\ncodec = "fixed8"\noptions = { exponent = -8 }\n')
    report = ingot.convert(tmp_path / "model.safetensors", tmp_path / "model.zt", recipe=str(recipe))
    assert report.tensors[0].codec == "fixed8"
    assert report.tensors[0].nbytes == 64
    with ingot.open(tmp_path / "model.zt") as ckpt:
        found = ckpt["layers.0.mlp.up_proj.weight"].numpy()
    assert np.abs(found - weights["layers.0.mlp.up_proj.weight"]).max() <= 2**-9
    assert not [finding for finding in ingot.verify(tmp_path / "model.zt") if finding.level == "error"]


@pytest.mark.parametrize(
    ("heading", "protocols"), [("A codec in an hour", (Codec, Encoder)), ("A format in an hour", (Format,))]
)
def test_every_member_of_a_contract_is_explained(heading: str, protocols: tuple[type, ...]) -> None:
    section = PAGE.read_text("utf-8").partition(f"## {heading}")[2].partition("\n## ")[0]
    members = {name for one in protocols for name in (*vars(one), *one.__annotations__) if not name.startswith("_")}
    assert members - set(re.findall(r"[a-z_]+", section)) == set()
