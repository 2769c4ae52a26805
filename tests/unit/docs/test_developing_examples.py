"""The examples of docs/developing pass their suites, and Ingot uses them once they are registered."""

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

PAGES = Path(__file__).resolve().parents[3] / "docs" / "developing"


def _code(page: str) -> str:
    """Return the last Python block of a page."""
    return (PAGES / f"{page}.md").read_text("utf-8").rpartition("\n```python\n")[2].partition("\n```\n")[0]


def _example(name: str, code: str) -> ModuleType:
    module = ModuleType(name)
    sys.modules[name] = module
    exec(compile(code, name, "exec"), module.__dict__)
    return module


CODE, DIALECT, STORE = _code("codec"), _code("format"), _code("store")
TestFixed8 = _example("example_codec", CODE).TestFixed8  # collected and run like any other
TestZipStore = _example("example_store", STORE).TestZipStore

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


USE_DIALECT = """
import numpy as np
import ingot
from ingot.errors import FormatError
from ingot.formats.detect import FORMATS

FORMATS.add("rows8", "rows8:Rows8Format")  # instead of the line in formats/table.py
with ingot.open("packed") as ckpt:
    assert (ckpt.format, ckpt["w"].codec, ckpt["w"].shape) == ("rows8", "affine", (8, 16))
    values = np.load("values.npy")
    assert np.array_equal(ckpt["w"].numpy(), values)
    assert np.array_equal(ckpt["w"][2:5, 3:7], values[2:5, 3:7])
report = ingot.convert("packed", "model.zt")
assert [(tensor.codec, tensor.action) for tensor in report.tensors] == [("dense", "moved"), ("affine", "moved")]
assert ingot.compare("packed", "model.zt").same
try:
    ingot.open("broken")
except FormatError as error:
    assert error.rule == "rows8.scale"
else:
    raise AssertionError
"""


USE_STORE = """
import pickle, zipfile
import ingot
from ingot.errors import UsageError
from ingot.stores.scheme import STORES

STORES.add("zip", "zipstore:ZipScheme")  # instead of the line in stores/scheme.py
with zipfile.ZipFile("a b.zip", "w") as archive:
    archive.write("model.safetensors", "m/model.safetensors")
    archive.writestr("m/config.json", "{}")
for address in ("zip:a b.zip!m", "zip:a b.zip!m/model.safetensors"):
    with ingot.open(address) as ckpt, pickle.loads(pickle.dumps(ckpt)) as again:
        assert set(again) == set(ckpt) != set()
assert ingot.convert("zip:a b.zip!m", "out", format="safetensors").companions == ["config.json"]
assert ingot.compare("zip:a b.zip!m", "out").same
try:
    ingot.open("zip:a b.zip!n")
except UsageError as error:
    assert error.rule == "open.missing"
else:
    raise AssertionError
"""


def test_a_dialect_is_opened_and_its_codes_move(tmp_path: Path) -> None:
    codes = np.random.default_rng(0).integers(-128, 128, (8, 16), np.int8)
    scale = np.linspace(0.5, 2, 8, dtype=np.float32)
    np.save(tmp_path / "values.npy", codes * scale[:, None])
    for folder, scales in (("packed", scale), ("broken", scale[1:])):
        arrays = {"norm": np.ones(3, np.float32), "w.q": codes, "w.scale": scales}
        (tmp_path / folder).mkdir()
        ingot.save(tmp_path / folder / "model.safetensors", arrays)
        (tmp_path / folder / "config.json").write_text('{"quantization_config": {"quant_method": "rows8"}}')
    (tmp_path / "rows8.py").write_text(DIALECT, "utf-8")
    (tmp_path / "use.py").write_text(USE_DIALECT, "utf-8")
    run = subprocess.run([sys.executable, "use.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_an_archive_is_opened_like_a_folder(tmp_path: Path) -> None:
    ingot.save(tmp_path / "model.safetensors", {"w": np.arange(64, dtype=np.float32).reshape(8, 8)})
    (tmp_path / "zipstore.py").write_text(STORE, "utf-8")
    (tmp_path / "use.py").write_text(USE_STORE, "utf-8")
    run = subprocess.run([sys.executable, "use.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


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


@pytest.mark.parametrize(("page", "protocols"), [("codec", (Codec, Encoder)), ("format", (Format,))])
def test_every_member_of_a_contract_is_explained(page: str, protocols: tuple[type, ...]) -> None:
    text = (PAGES / f"{page}.md").read_text("utf-8")
    prose = "\n".join(text.split("\n```")[::2])  # an example does not explain
    members = {name for cls in protocols for name in (*vars(cls), *cls.__annotations__) if not name.startswith("_")}
    assert members - set(re.findall(r"[a-z_]+", prose)) == set()
