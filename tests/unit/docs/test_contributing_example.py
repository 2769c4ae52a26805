"""The codec that CONTRIBUTING.md shows passes the suite, and a recipe can use it once it is in the table."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import ingot
from ingot.codecs.base import Codec, Encoder
from ingot.formats.base import Format

PAGE = Path(__file__).resolve().parents[3] / "CONTRIBUTING.md"


def _example() -> ModuleType:
    module = ModuleType("contributing_example")
    sys.modules[module.__name__] = module
    exec(compile(CODE, str(PAGE), "exec"), module.__dict__)
    return module


CODE = (
    PAGE.read_text("utf-8").partition("## A codec in an hour")[2].partition("\n```python\n")[2].partition("\n```\n")[0]
)
EXAMPLE = _example()
TestFixed8 = EXAMPLE.TestFixed8  # collected and run like any other

USE = """
import ingot
from ingot.codecs.table import CODECS

CODECS.add("fixed8", "fixed8:Fixed8Codec")  # instead of the line in codecs/table.py
report = ingot.convert("model.safetensors", "model.zt", recipe="fixed.toml")
assert [(tensor.codec, tensor.nbytes) for tensor in report.tensors] == [("fixed8", 64)]
with ingot.open("model.zt") as ckpt:
    ingot.save("back.safetensors", {name: tensor.numpy() for name, tensor in ckpt.items()})
assert not [finding for finding in ingot.verify("model.zt") if finding.level == "error"]
"""


def test_a_recipe_can_use_it(tmp_path: Path) -> None:
    weights = {"layers.0.mlp.up_proj.weight": np.linspace(-0.4, 0.4, 64, dtype=np.float32).reshape(8, 8)}
    ingot.save(tmp_path / "model.safetensors", weights)
    (tmp_path / "fixed.toml").write_text('[[rules]]\ncodec = "fixed8"\noptions = { exponent = -8 }\n')
    (tmp_path / "fixed8.py").write_text(CODE, "utf-8")
    (tmp_path / "use.py").write_text(USE, "utf-8")
    run = subprocess.run([sys.executable, "use.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    (worst,) = ingot.compare(tmp_path / "model.safetensors", tmp_path / "back.safetensors").tensors
    assert worst.stats is not None
    assert worst.stats.max_abs <= 2**-9


@pytest.mark.parametrize(
    ("heading", "protocols"), [("A codec in an hour", (Codec, Encoder)), ("A format in an hour", (Format,))]
)
def test_every_member_of_a_contract_is_explained(heading: str, protocols: tuple[type, ...]) -> None:
    section = PAGE.read_text("utf-8").partition(f"## {heading}")[2].partition("\n## ")[0]
    members = {name for one in protocols for name in (*vars(one), *one.__annotations__) if not name.startswith("_")}
    assert members - set(re.findall(r"[a-z_]+", section)) == set()
