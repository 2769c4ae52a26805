"""Folders that torchao, optimum-quanto, hqq and ModelOpt wrote: values are those that the packages themselves decode.

``make_torch_packages.py`` makes the files.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import ingot
from tests.support.entries import stored_entries

ROOT = Path(__file__).parent / "torch_packages"
FOLDERS = sorted(path.name for path in ROOT.iterdir() if path.is_dir())


@pytest.mark.parametrize("name", FOLDERS)
def test_values_are_those_of_the_package(name: str, tmp_path: Path) -> None:
    assert len(FOLDERS) == 18
    ingot.convert(ROOT / name, tmp_path / "moved.zt")
    with (
        ingot.open(ROOT / f"{name}.safetensors") as wanted,
        ingot.open(ROOT / name) as folder,
        ingot.open(tmp_path / "moved.zt") as moved,
    ):
        assert folder.format == name.partition("-")[0]
        assert set(folder) == set(wanted) == set(moved)
        for key, tensor in wanted.items():
            for checkpoint in (folder, moved):
                packed = not key.endswith("bias") and not (folder.format == "modelopt" and "_proj" not in key)
                assert (checkpoint[key].codec != "dense") == packed
                assert np.array_equal(checkpoint[key].numpy("bf16"), tensor.numpy()), key


@pytest.mark.parametrize(
    ("name", "old", "new", "rule"),
    [
        ("torchao-int8", b"Int8Tensor", b"Int9Tensor", "torchao.type"),
        ("torchao-int8", b"Int8Tensor", b"Int4Tensor", "torchao.dtype"),
        ("torchao-small", b'is_swizzled_scales\\": true', b'is_swizzled_scales\\":false', "torchao.shape"),
        ("torchao-small", b'"mxfp4._weight_scale"', b'"mxfp4._weight_scal_"', "torchao.parts"),
        ("torchao-int8", b"a._weight_scale", b"a._weight_scal_", "torchao.parts"),
        ("torchao-fp8", b"a._weight_scale", b"a._weight_scal_", "torchao.parts"),
        ("quanto-int8", b"a.weight._scale", b"a.weight._scal_", "quanto.parts"),
        ("quanto-int8", b"b.weight._data", b"b._data._data_", "quanto.parts"),
        ("quanto-int4", b"a.weight._shift", b"a.weight._shif_", "quanto.parts"),
        ("quanto-int4", b"up_proj.weight", b"no_proj.weight", "quanto.type"),
        ("hqq-4", b'"a.zero"', b'"a.zer_"', "hqq.parts"),
        ("hqq-4", b"4bit_u8", b"9bit_u8", "hqq.packing"),
        ("hqq-4", b"4bit_u8", b"2bit_u8", "hqq.shape"),
        ("hqq-4-axis-0", b'"a.zero"', b'"a.zer_"', "hqq.parts"),
        ("modelopt-int4", b"mlp.gate_proj.weight_scale", b"mlp.gate_proj.weight_scal_", "modelopt.parts"),
        ("modelopt-int4", b"self_attn.o_proj.pre", b"self_attn.q_pro_.pre", "modelopt.pre-quant-scale"),
        ("hqq-3", b'"I32","shape":[]', b'"F32","shape":[]', "hqq.dtype"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, old: bytes, new: bytes, rule: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / name, tmp_path / "x")
    file = tmp_path / "x" / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(old, new))
    with pytest.raises(ingot.IngotError) as caught:
        ingot.open(tmp_path / "x")
    assert caught.value.rule == rule
    (tmp_path / "x" / "config.json").write_text(json.dumps([]))
    with pytest.raises(ingot.IngotError) as caught:
        ingot.open(tmp_path / "x")


def test_modelopt_s_integers_are_written_as_modelopt_has_them(tmp_path: Path) -> None:
    ingot.convert(ROOT / "modelopt-int4", tmp_path / "m.zt")
    ingot.convert(tmp_path / "m.zt", tmp_path / "back", format="modelopt")
    assert stored_entries(tmp_path / "back") == stored_entries(ROOT / "modelopt-int4")
    with ingot.open(tmp_path / "back") as back:
        assert all(tensor.codec == "affine_words" for name, tensor in back.items() if "_proj" in name)
    # Its integers become another program's, and those of another program its own; factors have no place there.
    report = ingot.convert(tmp_path / "m.zt", tmp_path / "ct", format="compressed-tensors")
    assert (report.actions["repacked"], report.actions["decoded"]) == (5, 2)
    ingot.convert(tmp_path / "ct", tmp_path / "again", format="modelopt")
    entries = stored_entries(tmp_path / "again")
    assert all(entries[name] == value for name, value in stored_entries(tmp_path / "back").items() if "q_proj" in name)


def test_text_of_hqq_is_bytes(tmp_path: Path) -> None:
    """Hostile settings may be numbers that no byte has."""
    shutil.copytree(ROOT / "hqq-4", tmp_path / "x")
    file = tmp_path / "x" / "model.safetensors"
    held = file.read_bytes().replace(b'"a.packing":{"dtype":"U8"', b'"a.packing":{"dtype":"I8"')
    file.write_bytes(held.replace(b"4bit_u8", b"\xb4bit_u8"))
    with pytest.raises(ingot.IngotError) as caught:
        ingot.open(tmp_path / "x")
    assert caught.value.rule == "hqq.packing"


@pytest.mark.parametrize(("other", "rule"), [(192, None), (320, None), (384, "quanto.type")])
def test_parts_of_a_model_have_to_agree_on_columns(other: int, rule: str | None, tmp_path: Path) -> None:
    """Nothing in a file tells which part's ``up_proj`` it is: of sizes that both fit none is guessed."""
    shutil.copytree(ROOT / "quanto-int4", tmp_path / "x")
    parts = {"text_config": {"hidden_size": 192}, "vision_config": {"hidden_size": other}}
    (tmp_path / "x" / "config.json").write_text(json.dumps(parts))
    if rule is None:
        with ingot.open(tmp_path / "x") as found, ingot.open(ROOT / "quanto-int4") as wanted:
            assert {name: found[name].shape for name in found} == {name: wanted[name].shape for name in wanted}
        return
    with pytest.raises(ingot.IngotError) as caught:
        ingot.open(tmp_path / "x")
    assert caught.value.rule == rule
