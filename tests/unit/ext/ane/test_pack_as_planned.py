"""What the plan says of a form is how it is packed, on every chip: in the stored bytes, with the values they give."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.cli.main import run
from ingot.errors import UnsupportedError, UsageError
from ingot.ext.ane.chips.chips import load_chip
from ingot.ext.ane.kernel import inspect_kernel, load_kernel, pack_kernel, pack_model

RECIPE = """
[[rules]]
match = "*p3*"
codec = "palette"
options = { bits = 3 }
[[rules]]
match = "*pairs*"
codec = "palette"
options = { bits = 4, vector = 2 }
[[rules]]
match = "*across*"
codec = "palette"
options = { bits = 4, vector = 2, vector_axis = 1 }
[[rules]]
match = "*grouped*"
codec = "palette"
options = { bits = 4, group = 16 }
[[rules]]
match = "*asym*"
codec = "affine"
options = { bits = 8, group = "row", symmetric = false, scales = "f32", quantizer = "minmax" }
[[rules]]
match = "*sym*"
codec = "affine"
options = { bits = 8, group = "row", symmetric = true, scales = "f16", quantizer = "absmax" }
[[rules]]
match = "*blocks*"
codec = "affine"
options = { bits = 8, group = 32, symmetric = true, scales = "f16", quantizer = "absmax" }
[[rules]]
match = "*sparse_int*"
codec = "sparse_mask"
options = { sparsity = 0.5, inner = "affine", options = { bits = 8, group = "row", symmetric = true } }
[[rules]]
match = "*sparse_p3*"
codec = "sparse_mask"
options = { sparsity = 0.5, inner = "palette", options = { bits = 3 } }
"""
NAMES = ("p3", "pairs", "across", "grouped", "asym", "sym", "blocks", "sparse_int", "sparse_p3", "plain")
SHAPE = (96, 64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng, folder = np.random.default_rng(5), tmp_path_factory.mktemp("packed")
    tensors = {f"a.{name}.weight": rng.standard_normal(SHAPE).astype(np.float32) for name in NAMES}
    tensors["a.asym.weight"] += np.float32(0.7)  # so that no integers around 0 hold it
    tensors["a.plain.bias"] = np.ones(SHAPE[0], np.float32)
    tensors["a.identity.weight"] = np.diag(rng.random(96)).astype(np.float16)
    tensors["a.e4m3.weight"] = rng.standard_normal(SHAPE).astype(ml_dtypes.float8_e4m3fn)
    tensors["a.norm.weight"] = np.ones(64, np.float32)
    ingot.save(folder / "model.safetensors", tensors)
    (folder / "recipe.toml").write_text(RECIPE)
    ingot.convert(folder / "model.safetensors", folder / "model.zt", str(folder / "recipe.toml"))
    return folder / "model.zt"


FORMATS = {
    "p3": {"m4": "palette4 of half", "m6": "palette3 of half"},
    "pairs": {"m1": "palette4 of half", "m6": "palette4 of half"},
    "across": {"m1": "fp16", "m4": "fp16", "m6": "fp16"},
    "grouped": {"m4": "palette4 of half"},
    "asym": {"m1": "fp16", "m2": "fp16", "m4": "int8", "m6": "int8"},
    "sym": {"m1": "fp16", "m2": "int8", "m4": "int8"},
    "blocks": {"m1": "fp16", "m6": "fp16"},
    "sparse_int": {"m1": "fp16", "m2": "int8", "m4": "int8", "m6": "int8"},
    "sparse_p3": {"m4": "palette4 of half", "m6": "palette3 of half"},
    "identity": {"m1": "unity fp16", "m6": "unity fp16"},
    "e4m3": {"a19": "e4m3", "m6": "e4m3"},
    "plain": {"m1": "fp16", "m6": "fp16"},
}


@pytest.mark.parametrize(("name", "chip"), [(name, chip) for name, chips in FORMATS.items() for chip in chips])
def test_every_form_is_packed_as_it_is_planned(model: Path, tmp_path: Path, name: str, chip: str) -> None:
    out, tensor = tmp_path / "w.anek", f"a.{name}.weight"
    report = pack_kernel(model, tensor, out, chip)
    planned = next(item for item in ingot.plan(model, chip)[chip].weights if item.name == tensor)
    assert report.form == FORMATS[name][chip]
    assert report.decision == planned.decision
    assert (report.form == "fp16") <= (planned.decision is not None and not planned.decision.streams)
    unit, sizes = load_kernel(out), inspect_kernel(out).sections
    with ingot.open(model) as checkpoint:
        wanted = checkpoint[tensor].numpy("f32")
    np.testing.assert_array_equal(unit.dense(), wanted.astype(np.float16))
    if planned.decision is not None and planned.decision.streams:
        stored = sum(sizes[section]["length"] for section in ("pal", "scale", "weights"))
        # Tiles begin at multiples of 64 bytes, and the bits of every group at a byte.
        assert planned.moved <= stored + 2 * SHAPE[0] <= planned.moved + 16 * 64 + 4 * SHAPE[0]
    assert unit.header.word == planned.word or report.form == "unity fp16"


def test_blocks_are_packed_where_they_are_assumed_to_stream(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "w.anek"
    report = pack_kernel(model, "a.blocks.weight", out, "m4", assume=["blockwise8=streams"])
    assert (report.form, report.decision.streams) == ("int8", True)
    unit = load_kernel(out)
    assert (unit.header.block, unit.weight.scale is not None and unit.weight.scale.shape) == (32, (96, 2))
    with ingot.open(model) as checkpoint:
        np.testing.assert_allclose(unit.dense(), checkpoint["a.blocks.weight"].numpy("f32"), rtol=2**-10, atol=1e-6)


def test_zero_points_and_widened_codebooks_are_in_the_unit(model: Path, tmp_path: Path) -> None:
    pack_kernel(model, "a.asym.weight", tmp_path / "z.anek", "m6")
    zero = load_kernel(tmp_path / "z.anek").weight.zero
    assert zero is not None
    assert (zero.shape, zero.dtype, zero.any()) == ((96,), np.int8, True)
    pack_kernel(model, "a.p3.weight", tmp_path / "p.anek", "m4")
    books = load_kernel(tmp_path / "p.anek").weight.codebooks
    assert books is not None
    assert books.shape == (1, 16, 1)
    assert not books[:, 8:].any()


def test_scales_that_half_does_not_hold_are_single_precision(model: Path, tmp_path: Path) -> None:
    """The descriptor has either (B25, listing 25.1): values are those of the checkpoint, to the last bit."""
    out = tmp_path / "x.anek"
    pack_kernel(model, "a.asym.weight", out, "m4")
    assert (inspect_kernel(out).sections["scale"]["type"], inspect_kernel(out).sections["scale"]["bits"]) == (6, 32)
    with ingot.open(model) as checkpoint:
        np.testing.assert_array_equal(load_kernel(out).dense(), checkpoint["a.asym.weight"].numpy("f16"))
    pack_kernel(model, "a.sym.weight", tmp_path / "half.anek", "m4")
    assert inspect_kernel(tmp_path / "half.anek").sections["scale"]["bits"] == 16


def test_a_whole_model_is_a_unit_per_kernel(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    assert run(["kernel", str(model), str(folder), "--chip", "m6"]) == 0
    kernels = {item.name for item in ingot.plan(model, "m6")["m6"].kernels}
    assert {item.name for item in folder.iterdir()} == {"kernels.json", *(f"{name}.anek" for name in kernels)}
    assert load_kernel(folder / "a.plain.weight.anek").weight.bias is not None
    assert run(["kernel", str(model), str(folder), "--chip", "m6"]) == 2
    assert run(["kernel", str(model), str(folder), "--chip", "m6", "--overwrite"]) == 0
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UsageError) as found:
        pack_model(model, folder, "m6", overwrite=True)
    assert found.value.rule == "target.foreign"


def test_what_a_chip_refuses_is_told_by_name(model: Path, tmp_path: Path) -> None:
    report = pack_model(model, tmp_path / "m1", "m1")
    refused = {item.name for item in ingot.plan(model, "m1")["m1"].kernels if item.moved == 0}
    assert set(report.refused) == refused >= {"a.e4m3.weight", "a.p3.weight"}
    assert run(["kernel", str(model), str(tmp_path / "again"), "--chip", "m1"]) == 1
    with pytest.raises(UnsupportedError) as found:
        pack_kernel(model, "a.e4m3.weight", tmp_path / "x.anek", load_chip("m1").name)
    assert found.value.rule == "ane.refused"
    ingot.save(tmp_path / "none.safetensors", {"a.norm.weight": np.ones(4, np.float32)})
    with pytest.raises(UsageError) as none:
        pack_model(tmp_path / "none.safetensors", tmp_path / "none", "m1")
    assert none.value.rule == "ane.kernels"


def test_masks_whose_rows_fill_words_are_packed_too(tmp_path: Path) -> None:
    values = np.random.default_rng(6).standard_normal((96, 40)).astype(np.float16)
    ingot.save(tmp_path / "a.safetensors", {"a.weight": values})
    (tmp_path / "r.toml").write_text(
        "[[rules]]\ncodec = 'sparse_mask'\noptions = { sparsity = 0.6, row_alignment = 64 }"
    )
    ingot.convert(tmp_path / "a.safetensors", tmp_path / "a.zt", tmp_path / "r.toml")
    report = pack_kernel(tmp_path / "a.zt", "a.weight", tmp_path / "w.anek", "m4")
    assert report.decision is not None
    assert report.decision.streams
    with ingot.open(tmp_path / "a.zt") as checkpoint:
        np.testing.assert_array_equal(load_kernel(tmp_path / "w.anek").dense(), checkpoint["a.weight"].numpy())
