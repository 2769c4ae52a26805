"""What squish's own program writes opens with the values that its layouts say, read here by NumPy alone.

The files in tests/golden/squish_ai were made by squish-ai 9.34.15; one test has that program, installed in a virtual
environment of its own, make them again.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.errors import IngotError

ROOT = Path(__file__).parents[1] / "golden" / "squish_ai"
SCRIPT = ROOT.parent / "make_squish_ai.py"
PACKAGE = "squish-ai==9.34.15"
FORMS = ("int8", "milo", "milo-groups-of-32", "nf4")
CODECS = {"int8": "affine", "milo": "with_low_rank", "milo-groups-of-32": "with_low_rank", "nf4": "scaled_codebook"}

Array = np.ndarray[Any, Any]
Load = Callable[[str], Array | None]


def from_folder(folder: Path, key: str) -> Load:
    def load(suffix: str) -> Array | None:
        path = folder / "tensors" / f"{key}__{suffix}.npy"
        return np.load(path) if path.exists() else None

    return load


def from_archive(path: Path, key: str) -> Load:
    archive = np.load(path)
    return lambda suffix: archive[f"{key}__{suffix}"] if f"{key}__{suffix}" in archive.files else None


def as_squish_lays_it_out(load: Load, group: int) -> Array:
    """Decode in double precision from the layouts of squish's modules milo_quant, nf4_quant and quantizer."""
    shape = load("shape")
    assert shape is not None
    size = int(np.prod(shape))
    packed, scales = load("q3"), load("s3")
    if packed is not None:
        triples = packed.reshape(-1, 3).astype(np.uint32)
        words = triples[:, 0] | triples[:, 1] << 8 | triples[:, 2] << 16
        codes = np.stack([words >> 3 * i & 7 for i in range(8)], -1).reshape(-1)[:size].astype(float)
        values = (codes - np.repeat(load("z3"), group)[:size]) * np.repeat(scales, group)[:size]
        return (values.reshape(-1, shape[-1]) + load("lra").astype(float) @ load("lrb")).reshape(shape)
    packed, scales = load("nf4"), load("s_nf4")
    if packed is not None:
        normal = np.array(
            [-1, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0, 0.0795803]
        )
        normal = np.append(normal, [0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1])
        indices = np.stack([packed & 15, packed >> 4], -1).reshape(*scales.shape, -1)
        return (normal[indices] * scales[..., None]).reshape(shape)
    codes, scales = load("q").astype(float), load("s")
    grouped = codes.reshape(len(codes), scales.size // len(codes), -1)
    return (grouped * scales.reshape(len(codes), -1, 1)).reshape(shape)


def check(folder: Path, form: str) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    group = 32 if form.endswith("32") else 64
    with ingot.open(folder) as checkpoint:
        assert set(checkpoint) == set(manifest)
        assert CODECS[form] in {tensor.codec for tensor in checkpoint.values()}
        for name, key in manifest.items():
            wanted = as_squish_lays_it_out(from_folder(folder, key), group)
            assert checkpoint[name].shape == wanted.shape
            assert np.allclose(checkpoint[name].numpy("f32"), wanted, rtol=0, atol=1e-6), name
    assert not [finding for finding in ingot.verify(folder) if finding.level == "error"]


def original(root: Path) -> dict[str, Array]:
    arrays = {}
    for path in (root / "model").glob("*.safetensors"):
        with ingot.open(path) as checkpoint:
            arrays.update({name: tensor.numpy() for name, tensor in checkpoint.items()})
    return arrays


@pytest.mark.parametrize("form", FORMS)
def test_directories_have_the_values_of_their_layouts(form: str) -> None:
    check(ROOT / form, form)


def test_the_correction_of_three_bits_is_added() -> None:
    """What MiLo stores as two factors makes the weights nearer to the original's."""
    wanted = original(ROOT)
    name = "model.layers.0.self_attn.q_proj.weight"
    with ingot.open(ROOT / "milo") as checkpoint:
        tensor = checkpoint[name]
        assert tensor.params["rank"] == 8
        error = np.linalg.norm(tensor.numpy() - wanted[name])
        left, right = (
            tensor.parts[role].array().reshape(shape) for role, shape in (("left", (24, 8)), ("right", (8, 64)))
        )
        assert error < 0.8 * np.linalg.norm(tensor.numpy() - left @ right - wanted[name])


@pytest.mark.parametrize("where", ["file", "folder", "bare"])
def test_an_archive_with_its_manifest(where: str, tmp_path: Path) -> None:
    """squish names the manifest X_manifest.json, or X where it was told to write X and NumPy wrote X.npz."""
    shutil.copy(ROOT / "weights.npz", tmp_path)
    shutil.copy(ROOT / "weights_manifest.json", tmp_path / ("weights" if where == "bare" else "weights_manifest.json"))
    path = tmp_path if where == "folder" else tmp_path / "weights.npz"
    manifest = json.loads((ROOT / "weights_manifest.json").read_text())
    with ingot.open(path) as checkpoint:
        assert checkpoint.format == "npz"
        for name, key in manifest.items():
            wanted = as_squish_lays_it_out(from_archive(ROOT / "weights.npz", key), 64)
            assert np.allclose(checkpoint[name].numpy("f32"), wanted, rtol=0, atol=1e-6), name
        assert np.array_equal(checkpoint[name][1:], checkpoint[name].numpy()[1:])
    assert not [finding for finding in ingot.verify(path) if finding.level == "error"]
    ingot.convert(path, tmp_path / "squish", None, "npydir")
    with ingot.open(path) as a, ingot.open(tmp_path / "squish") as b:
        assert all(np.array_equal(a[name].numpy("f32"), b[name].numpy("f32")) for name in a)


def test_archives_are_refused_where_they_say_too_little_or_are_damaged(tmp_path: Path) -> None:
    path = tmp_path / "weights.npz"
    shutil.copy(ROOT / "weights.npz", path)

    def read() -> None:
        with ingot.open(path) as checkpoint:
            checkpoint.state_dict()

    def rule() -> str | None:
        with pytest.raises(IngotError) as caught:
            read()
        return caught.value.rule

    assert rule() == "npz.manifest"
    shutil.copy(ROOT / "weights_manifest.json", tmp_path)
    whole = path.read_bytes()
    middle = whole.index(b"PK\x03\x04", whole.index(b"down_proj__weight__q.npy")) - 6
    path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    assert rule() in ("archive.crc", "archive.deflate", "archive.size")
    path.write_bytes(whole[:-40])
    assert rule() == "archive.end"
    with pytest.raises(IngotError) as caught:
        ingot.convert(ROOT / "int8", tmp_path / "new.npz")
    assert caught.value.rule == "convert.unsupported"


@pytest.mark.parametrize("form", ["milo", "nf4"])
def test_conversions_keep_what_is_stored(form: str, tmp_path: Path) -> None:
    ingot.convert(ROOT / form, tmp_path / "a.zt")
    ingot.convert(ROOT / form, tmp_path / "squish", None, "npydir")  # decoded: the writer has no such forms
    with (
        ingot.open(ROOT / form) as source,
        ingot.open(tmp_path / "a.zt") as moved,
        ingot.open(tmp_path / "squish") as own,
    ):
        for name, tensor in source.items():
            assert moved[name].codec == tensor.codec
            assert np.array_equal(moved[name].numpy("f32"), tensor.numpy("f32"))
            assert np.array_equal(own[name].numpy("f32"), tensor.numpy("f32"))


def test_an_unfinished_run_is_refused_as_such(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "milo", tmp_path / "squish")
    noted = json.loads((tmp_path / "squish" / "_compress_progress.json").read_text())
    assert len(noted["completed_shards"]) == noted["total_shards"] == 2
    noted["completed_shards"].pop()
    (tmp_path / "squish" / "_compress_progress.json").write_text(json.dumps(noted))
    with pytest.raises(IngotError) as caught:
        ingot.open(tmp_path / "squish")
    assert caught.value.rule == "npydir.unfinished"


@pytest.fixture(scope="session")
def squish_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that has squish-ai, without the packages that it asks for and does not need to compress."""
    folder = tmp_path_factory.mktemp("squish") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    install = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    for more in (["--no-deps", PACKAGE], ["numpy", "safetensors", "rich", "psutil", "zstandard"]):
        done = subprocess.run([*install, *more], check=False, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{PACKAGE} cannot be installed here: {done.stderr.strip().splitlines()[-1][:200]}")
    return python


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_squish_itself_writes_what_opens(squish_python: str, tmp_path: Path) -> None:
    subprocess.run([squish_python, str(SCRIPT), str(tmp_path)], check=True, timeout=200)
    for form in FORMS:
        check(tmp_path / form, form)
    for name, wanted in original(tmp_path).items():
        with ingot.open(tmp_path / "weights.npz") as checkpoint:
            error = np.linalg.norm(checkpoint[name].numpy("f32") - wanted)
            assert error < 0.01 * np.linalg.norm(wanted)
