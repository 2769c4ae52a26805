"""The golden corpus of ONNX: in step with its script, read or refused as names say; peers' models as they read them."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.errors import IngotError

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "onnx"
PEERS = FOLDER / "peers"


def script():
    spec = importlib.util.spec_from_file_location("make_onnx", Path(__file__).parent / "make_onnx.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cases(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.onnx"))


def test_the_corpus_is_what_its_script_makes():
    files = (path for part in ("valid", "reject") for path in (FOLDER / part).iterdir())
    assert {str(path.relative_to(FOLDER)): path.read_bytes() for path in files} == script().corpus()


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("name", cases(FOLDER / "valid"))
def test_valid_files_open_and_decode(name, io):
    with ingot.open(FOLDER / "valid" / name, io=io) as checkpoint:
        for item in checkpoint.values():
            assert item.decoder is not None
            if not item.dtype.startswith(("int", "uint", "f4")):  # which move, and have no values
                assert item.numpy().shape == item.shape


@pytest.mark.parametrize("name", cases(FOLDER / "reject"))
def test_rejected_files_name_their_rule(name):
    with pytest.raises(IngotError) as caught:
        ingot.open(FOLDER / "reject" / name)
    assert caught.value.rule == "onnx." + name.removesuffix(".onnx").partition("--")[0]


def test_every_rule_has_a_golden_file():
    """Notes, the writer's rules, links and what would take a large file have none."""
    folder = ROOT / "src" / "ingot" / "formats" / "onnx"
    used = set(re.findall(r'"onnx\.([a-z0-9-]+)"', "".join(path.read_text() for path in folder.glob("*.py"))))
    covered = {name.removesuffix(".onnx").partition("--")[0] for name in cases(FOLDER / "reject")}
    writers = {"shared-data", "tensors", "too-large", "typed-data", "unsupported", "zero-point"}
    assert used - covered == {"inner-graphs", "external-link", "file-size", "count"} | writers


def matrix(path: Path) -> tuple[str, np.ndarray]:
    """Return the codec of a model's one matrix, and its values as MatMul has them."""
    with ingot.open(path) as checkpoint:
        (name,) = [name for name in checkpoint if len(checkpoint[name].shape) == 2]
        values = checkpoint[name].numpy("f32")
        return checkpoint[name].codec, values.T if values.shape == (24, 48) else values


@pytest.mark.parametrize("name", cases(PEERS))
def test_models_of_the_packages_have_the_values_that_onnxruntime_multiplies_with(name):
    told = json.loads((PEERS / name.replace("beside", "dense")).with_suffix(".json").read_text())
    expected = np.frombuffer(bytes.fromhex(told["f32"]), "<f4").reshape(told["shape"])
    codec, values = matrix(PEERS / name)
    codecs = {"dense": "dense", "dense-f16": "dense", "beside": "dense", "fp8": "scaled_codebook"}
    assert codec == codecs.get(name.removesuffix(".onnx"), "affine")
    assert np.array_equal(values, expected)


@pytest.mark.parametrize("name", [name for name in cases(PEERS) if "dense" not in name and "beside" not in name])
def test_models_of_the_packages_become_dense_and_stay_as_they_are(tmp_path, name):
    expected = matrix(PEERS / name)[1]
    ingot.convert(PEERS / name, tmp_path / "same.onnx")
    assert (tmp_path / "same.onnx").read_bytes() == (PEERS / name).read_bytes()
    ingot.convert(PEERS / name, tmp_path / "dense.onnx", recipe="decompress")
    codec, values = matrix(tmp_path / "dense.onnx")
    assert codec == "dense"
    assert np.array_equal(values, expected)


@pytest.mark.parametrize("name", sorted(path.stem for path in (FOLDER / "written").glob("*.onnx")))
def test_what_is_written_is_what_onnx_checked_and_onnxruntime_multiplies_with(tmp_path, name):
    path, out = FOLDER / "written" / f"{name}.onnx", tmp_path / "o.onnx"
    script().write(name, out)
    assert out.read_bytes() == path.read_bytes()
    told = json.loads(path.with_suffix(".json").read_text())
    expected = np.frombuffer(bytes.fromhex(told["f32"]), "<f4").reshape(told["shape"])
    assert np.array_equal(matrix(out)[1], expected)
