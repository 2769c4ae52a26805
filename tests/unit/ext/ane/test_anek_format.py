"""Kernel units as a format: values and layouts are those that were packed, a model's folder opens, damage is told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ingot
from ingot.artifacts.open import with_decoders
from ingot.cli.main import run
from ingot.errors import IngotError, IntegrityError, UnsupportedError
from ingot.ext.ane.chips.activation import fit_lut
from ingot.ext.ane.chips.chips import load_chip
from ingot.ext.ane.kernel import pack_model
from ingot.ext.ane.kernel_units.format import AnekFormat
from ingot.ext.ane.kernel_units.header import HEADER, seal
from ingot.ext.ane.kernel_units.pack import KernelWeight, pack_unit
from ingot.ext.ane.kernel_units.unit import read_unit
from ingot.model.layouts.affine import AffineLayout
from ingot.stores.memory import MemoryStore
from tests.support.stores import CountingStore

M1, M6 = load_chip("m1"), load_chip("m6")
LUT = fit_lut("tanh", domain=(-3.0, 3.0)).lut


def made(form: str, shape: tuple[int, ...]) -> KernelWeight:
    rng = np.random.default_rng(7)
    rows, cols = shape[0], int(np.prod(shape[1:]))
    mask = rng.random(shape) < 0.4 if "sparse" in form else None
    scale = rng.random(rows).astype(np.float16)
    codes = np.where(mask if mask is not None else True, rng.integers(-127, 128, shape), 0).astype(np.int8)
    halves = rng.standard_normal(shape).astype(np.float16)
    indices = rng.integers(0, 16, (rows, cols)).astype(np.uint8)
    books = rng.standard_normal((2, 16, 1)).astype(np.float16)
    if mask is not None:
        indices[~mask.reshape(rows, cols)] = 0
    weight = {
        "half": KernelWeight(shape, halves, 16),
        "sparse half": KernelWeight(shape, np.where(mask, halves, np.float16(0)), 16, mask=mask),
        "scaled half": KernelWeight(shape, halves, 16, scale=scale),
        "int8": KernelWeight(shape, codes, 8, scale=scale),
        "plain int8": KernelWeight(shape, codes, 8),
        "asymmetric int8": KernelWeight(shape, codes, 8, scale=scale, zero=np.arange(rows).astype(np.int8)),
        "single int8": KernelWeight(shape, codes, 8, scale=rng.random(rows).astype(np.float32)),
        "single zeros": KernelWeight(
            shape, codes, 8, scale=rng.random(rows).astype(np.float32), zero=np.arange(rows).astype(np.int8)
        ),
        "single palette": KernelWeight(
            shape, indices, 4, books, scale=np.repeat(rng.random(2).astype(np.float32), rows // 2)
        ),
        "blocks": KernelWeight(shape, codes, 8, scale=rng.random((rows, -(-cols // 4))).astype(np.float16), block=4),
        "sparse int8": KernelWeight(shape, codes, 8, mask=mask, scale=scale),
        "e4m3": KernelWeight(shape, rng.integers(0, 127, shape).astype(np.uint8), 8),
        "palette": KernelWeight(shape, indices, 4, books),
        "scaled palette": KernelWeight(shape, indices, 4, books, scale=np.repeat(scale[:2], rows // 2)),
        "odd palette": KernelWeight(shape, indices, 4, books, scale=scale),
        "pairs": KernelWeight(shape, indices[::2] % 8, 3, rng.standard_normal((1, 8, 2)).astype(np.float16)),
        "sparse palette": KernelWeight(shape, indices, 4, books, mask=None if mask is None else mask.reshape(rows, -1)),
        "int8 palette": KernelWeight(shape, indices, 4, (books * 30).astype(np.int8), scale=np.full(rows, scale[0])),
    }
    return weight[form]


CODECS = {
    "half": "dense",
    "sparse half": "sparse_mask",
    "scaled half": "dense",
    "int8": AffineLayout.codec,
    "plain int8": AffineLayout.codec,
    "asymmetric int8": AffineLayout.codec,
    "single int8": AffineLayout.codec,
    "single zeros": AffineLayout.codec,
    "single palette": "palette",
    "blocks": AffineLayout.codec,
    "sparse int8": "sparse_mask",
    "e4m3": "dense",
    "palette": "palette",
    "scaled palette": "palette",
    "odd palette": "dense",
    "pairs": "palette",
    "sparse palette": "sparse_mask",
    "int8 palette": "palette",
}


@pytest.mark.parametrize("form", CODECS)
@pytest.mark.parametrize("shape", [(40, 7), (70, 16), (8, 3, 3, 3)], ids=str)
def test_a_unit_opens_with_its_layout_and_values(tmp_path: Path, form: str, shape: tuple[int, ...]) -> None:
    data = pack_unit(made(form, shape), M6)
    path = tmp_path / "model.layers.0.mlp%2Fup.weight.anek"
    path.write_bytes(data)
    with ingot.open(path) as checkpoint:
        tensor = checkpoint["model.layers.0.mlp/up.weight"]
        assert (tensor.codec, tensor.shape) == (CODECS[form], shape)
        np.testing.assert_array_equal(tensor.numpy().astype(np.float16), read_unit(data).dense())
        pieces = [tensor[start : start + 3] for start in range(0, shape[0], 3)]
        np.testing.assert_array_equal(np.concatenate(pieces), tensor.numpy())
    assert not [item for item in ingot.verify(path) if item.level == "error"]
    ingot.convert(path, tmp_path / "back.zt")
    with ingot.open(tmp_path / "back.zt") as back:
        assert back["model.layers.0.mlp/up.weight"].codec == CODECS[form]
        np.testing.assert_array_equal(
            back["model.layers.0.mlp/up.weight"].numpy().astype(np.float16), read_unit(data).dense()
        )


def test_an_identity_a_bias_and_a_table_open_too(tmp_path: Path) -> None:
    scale = np.arange(1, 97).astype(np.float16)
    weight = KernelWeight((96, 96), np.zeros(0, np.float16), 16, scale=scale, bias=scale, lut=LUT, unity=True)
    path = tmp_path / "x.weight.anek"
    path.write_bytes(pack_unit(weight, M1))
    with ingot.open(path) as checkpoint:
        assert list(checkpoint) == ["x.weight", "x.bias", "x.activation"]
        np.testing.assert_array_equal(checkpoint["x.weight"].numpy(), np.diag(scale))
        np.testing.assert_array_equal(checkpoint["x.bias"].numpy(), scale)
        np.testing.assert_array_equal(checkpoint["x.activation"].numpy().view("u2"), LUT.entries().view("u2"))


RECIPE = """
[[rules]]
match = "*p4*"
codec = "palette"
options = { bits = 4 }
[[rules]]
match = "*int8*"
codec = "affine"
options = { bits = 8, group = "row", symmetric = true, scales = "f16", quantizer = "absmax" }
[[rules]]
match = "*half_is_zero*"
codec = "sparse_mask"
options = { sparsity = 0.5 }
"""
KERNELS = ("p4", "int8", "half_is_zero", "plain")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng, folder = np.random.default_rng(5), tmp_path_factory.mktemp("anek")
    tensors = {f"a.{name}.weight": rng.standard_normal((96, 64)).astype(np.float16) for name in KERNELS}
    tensors["a.plain.bias"] = np.ones(96, np.float16)
    tensors["a.norm.weight"] = np.ones(64, np.float16)
    ingot.save(folder / "model.safetensors", tensors)
    (folder / "recipe.toml").write_text(RECIPE)
    ingot.convert(folder / "model.safetensors", folder / "model.zt", str(folder / "recipe.toml"))
    pack_model(folder / "model.zt", folder / "kernels", "m4")
    return folder


def test_a_whole_model_opens_is_compared_and_converted_back(model: Path, tmp_path: Path) -> None:
    names = {*(f"a.{name}.weight" for name in KERNELS), "a.plain.bias"}
    with ingot.open(model / "kernels") as kernels, ingot.open(model / "model.zt") as source:
        assert set(kernels) == names
        assert kernels.metadata == {"ane_chip": "m4", "ane_target": "H16g"}
        for name in names:
            np.testing.assert_array_equal(kernels[name].numpy(), source[name].numpy("f16"))
            assert kernels[name].codec == source[name].codec
    assert not [item for item in ingot.verify(model / "kernels", strict=True) if item.level == "error"]
    compared = ingot.compare(model / "model.zt", model / "kernels")
    assert {item.name for item in compared.tensors if item.same} >= names
    assert run(["convert", str(model / "kernels"), str(tmp_path / "back.safetensors")]) == 0
    with ingot.open(tmp_path / "back.safetensors") as back, ingot.open(model / "model.zt") as source:
        for name in names:
            np.testing.assert_array_equal(back[name].numpy(), source[name].numpy("f16"))
    assert run(["inspect", str(model / "kernels")]) == 0


def _without(folder: Path) -> None:
    (folder / "a.p4.weight.anek").unlink()


def _exchanged(folder: Path) -> None:
    (folder / "a.p4.weight.anek").rename(folder / "x")
    (folder / "a.int8.weight.anek").rename(folder / "a.p4.weight.anek")
    (folder / "x").rename(folder / "a.int8.weight.anek")


def _changed_index(folder: Path) -> None:
    text = (folder / "kernels.json").read_text()
    (folder / "kernels.json").write_text(text.replace("a.p4.weight", "a.p5.weight", 1))


def _two_in_one(folder: Path) -> None:
    index = json.loads((folder / "kernels.json").read_text())
    index["units"]["a.p4.weight"] = index["units"]["a.int8.weight"]
    (folder / "kernels.json").write_text(json.dumps(index))


def _elsewhere(folder: Path) -> None:
    index = json.loads((folder / "kernels.json").read_text())
    index["units"]["a.p4.weight"]["file"] = "../a.p4.weight.anek"
    (folder / "kernels.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (_without, "anek.missing"),
        (_exchanged, "anek.digest"),
        (_changed_index, "manifest.digest"),
        (_two_in_one, "manifest.digest"),
        (_elsewhere, "manifest.digest"),
    ],
)
def test_a_folder_that_is_not_what_was_written_is_refused(
    model: Path, tmp_path: Path, change: Callable[[Path], None], rule: str
) -> None:
    shutil.copytree(model / "kernels", tmp_path / "kernels")
    change(tmp_path / "kernels")
    with pytest.raises(IngotError) as caught:
        ingot.open(tmp_path / "kernels")
    assert caught.value.rule == rule


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"units": {}}, "anek.index"),
        ({"units": {"a": {"file": "../a.anek", "digest": ""}}}, "anek.index"),
        ({"units": {"a": {"file": "a.anek", "digest": ""}, "b": {"file": "a.anek", "digest": ""}}}, "anek.index"),
        ({"units": {"a": 1}}, "anek.index"),
        ({"more": 1}, "anek.index"),
        ({"ingot_kernels": 2}, "anek.version"),
        ({"ingot_kernels": True}, "anek.version"),
    ],
)
def test_an_index_that_makes_no_sense_is_refused(change: dict[str, Any], rule: str) -> None:
    from ingot.ext.ane.kernel_units.index import Index, parse_index

    root = json.loads(Index("m1", "H13", {"a": ("a.anek", "crc32c:0x0")}).to_bytes())
    with pytest.raises(IngotError) as caught:
        parse_index(json.dumps({**root, **change}).encode(), verify=False)
    assert caught.value.rule == rule


def test_a_unit_that_was_not_packed_is_told(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model / "kernels", tmp_path / "kernels")
    shutil.copy(model / "kernels" / "a.p4.weight.anek", tmp_path / "kernels" / "b.anek")
    assert "anek.extra" in {item.rule for item in ingot.verify(tmp_path / "kernels")}


def test_a_tensor_that_is_read_alone_is_checked(tmp_path: Path) -> None:
    """Each unit has one digest over all of it: whoever reads a tensor reads it once more, before the first value."""
    data = bytearray(pack_unit(made("half", (40, 7)), M6))
    data[-3] ^= 1
    (tmp_path / "x.anek").write_bytes(data)
    with ingot.open(tmp_path / "x.anek") as checkpoint, pytest.raises(IntegrityError) as caught:
        checkpoint["x"].numpy()
    assert caught.value.rule == "anek.digest"
    with ingot.open(tmp_path / "x.anek", verify=False) as checkpoint:
        assert checkpoint["x"].numpy().shape == (40, 7)


def test_units_are_written_by_kernel_alone(model: Path, tmp_path: Path) -> None:
    for destination, format in ((tmp_path / "x.anek", None), (tmp_path / "folder", "anek")):
        with pytest.raises(UnsupportedError):
            ingot.convert(model / "model.zt", destination, format=format)
        assert not destination.exists()


def test_copies_that_differ_are_found_by_verify_alone(tmp_path: Path) -> None:
    """The M1 has sixteen copies of a scale; the first one is read."""
    weight = replace(made("int8", (40, 7)))
    data = bytearray(pack_unit(weight, M1))
    section = read_unit(bytes(data)).header.sections["scale"]
    data[section.offset + 128] ^= 1  # of the second copy
    seal(data)
    (tmp_path / "x.anek").write_bytes(data)
    assert "anek.copies" in {item.rule for item in ingot.verify(tmp_path / "x.anek") if item.level == "error"}


FORGED = {form: pack_unit(made(form, (40, 7)), M6) for form in CODECS}


@settings(max_examples=150)
@given(st.sampled_from(list(CODECS)), st.data())
def test_forged_units_open_as_they_are_read_or_are_refused(form: str, data: st.DataObject) -> None:
    """With the digest made to fit: what the strict reader takes opens, with the same values."""
    unit = bytearray(FORGED[form])
    for _ in range(data.draw(st.integers(1, 3))):
        unit[data.draw(st.integers(0, HEADER - 1) | st.integers(0, len(unit) - 1))] = data.draw(st.integers(0, 255))
    seal(unit)
    try:
        catalog = AnekFormat().read(MemoryStore({"x.anek": bytes(unit)}), "x.anek")
        values = with_decoders(catalog.tensors)["x"].numpy()
    except IngotError as error:
        if error.rule != "affine.overflow":  # an infinite scale: the unit's own reader gives infinities
            with pytest.raises(IngotError):
                read_unit(bytes(unit))
        return
    with suppress(IngotError):  # padding and copies are verify's to find
        np.testing.assert_array_equal(values.astype(np.float16), read_unit(bytes(unit)).dense())


def test_a_folder_opens_with_a_read_per_unit(model: Path) -> None:
    """A header each; of a sparse one also the masks of its groups."""
    files = {file.name: file.read_bytes() for file in (model / "kernels").iterdir()}
    store = CountingStore(MemoryStore(files))
    assert len(AnekFormat().read(store, "kernels.json").tensors) == len(KERNELS) + 1
    groups = len(read_unit(files["a.half_is_zero.weight.anek"]).records)
    assert store.requests == 1 + len(KERNELS) + groups
    assert store.nbytes == len(files["kernels.json"]) + HEADER * len(KERNELS) + 96 * 64 // 8
