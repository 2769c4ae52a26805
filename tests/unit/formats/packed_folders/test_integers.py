"""GPTQ, AWQ and compressed-tensors: values bit for bit, integers that move between them, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import ingot
from ingot.codecs.table import CODECS
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.errors import IngotError
from ingot.model.layouts.affine import OFFSETS, ROWS_LSB, AffineLayout, Group
from ingot.model.tensor import Tensor
from ingot.testing.codecs import encode_tensor

from . import packing
from .packing import Array, Layer, ct_config, layer

NAME = "model.layers.0.mlp.up_proj"
WEIGHT = f"{NAME}.weight"
DENSE = {"model.norm.weight": np.ones(4, np.float16)}


def gptq_config(of: Layer, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": of.bits, "group_size": group, "desc_act": False, **more}


def gptq(path: Path, of: Layer, group: int, *, less: bool = True) -> Path:
    kind = "gptq" if less else "gptq_v2"
    entries = {**DENSE, **packing.gptq(NAME, of, less=less)}
    return packing.folder(path, entries, gptq_config(of, group, checkpoint_format=kind))


def awq(path: Path, of: Layer, group: int, version: str = "gemm") -> Path:
    entries = packing.awq(NAME, of) if version == "gemm" else packing.gemv(NAME, of, group)
    stated = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": version}
    return packing.folder(path, {**DENSE, **entries}, stated)


def packed(path: Path, of: Layer, group: int, *, sym: bool) -> Path:
    entries = {**DENSE, **packing.pack_quantized(NAME, of, sym=sym)}
    return packing.folder(path, entries, ct_config(of.bits, group, sym=sym))


def values(path: Path, **options: Any) -> Array:
    with ingot.open(path, **options) as checkpoint:
        assert set(checkpoint) == {*DENSE, WEIGHT}
        whole: Array = checkpoint[WEIGHT].numpy()
        assert np.array_equal(checkpoint[WEIGHT][5:9, 3:40], whole[5:9, 3:40])
        return whole


def same(one: Array, other: Array) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("less", [True, False])
@pytest.mark.parametrize("low", [0, 1])
def test_gptq_s_values(tmp_path: Path, bits: int, less: bool, low: int) -> None:
    """Zero points of 0 too, which v1 stores by borrowing from the next field."""
    of = layer(96, 128, bits, 32, low=low)
    path = gptq(tmp_path / "m", of, 32, less=less)
    assert same(values(path), of.values)
    assert same(values(path, io="pread"), of.values)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_comes_back_as_it_was(tmp_path: Path, bits: int) -> None:
    """A part of equal zero points becomes an attribute, and what is written for it are the same bytes."""
    of = layer(64, 96, bits, 32, sym=True)
    gptq(tmp_path / "m", of, 32)
    report = ingot.convert(tmp_path / "m", tmp_path / "m.zt")
    assert [tensor.action for tensor in report.tensors if tensor.name == WEIGHT] == ["repacked"]
    with ingot.open(tmp_path / "m.zt") as checkpoint:
        tensor = checkpoint[WEIGHT]
        assert (tensor.codec, tensor.params["zero_point"]) == ("affine", 1 << (bits - 1))
        assert same(tensor.numpy(), of.values)
    ingot.convert(tmp_path / "m.zt", tmp_path / "back", format="gptq")
    before, after = load_file(tmp_path / "m" / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert set(before) == set(after)
    assert all(same(before[name], after[name]) for name in before)
    stated = json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"]
    assert (stated["checkpoint_format"], stated["sym"], stated["group_size"]) == ("gptq", True, 32)


def test_gptq_moves_into_gguf_s_blocks(tmp_path: Path) -> None:
    of = layer(64, 96, 4, 32, sym=True)
    report = ingot.convert(gptq(tmp_path / "m", of, 32), tmp_path / "m.gguf", keep_names=True)
    assert [tensor.action for tensor in report.tensors if tensor.name == WEIGHT] == ["repacked"]
    with ingot.open(tmp_path / "m.gguf") as checkpoint:
        tensor = checkpoint[WEIGHT]
        assert (tensor.codec, tensor.params["type"]) == ("ggml_blocks", "q4_0")
        assert same(tensor.numpy().astype(of.values.dtype), of.values)


def wide(path: Path) -> Array:
    """The values in f32, in which repacking keeps them; the sign of a zero aside."""
    with ingot.open(path) as checkpoint:
        found: Array = checkpoint[WEIGHT].numpy("f32") + np.float32(0)
        return found


@pytest.mark.parametrize(("kind", "format"), [("q4_0", "gptq"), ("q4_0", "awq"), ("q5_0", "compressed-tensors")])
def test_gguf_s_blocks_move_into_words(tmp_path: Path, kind: str, format: str) -> None:
    """In one conversion, and back to the same blocks."""
    weights = np.random.default_rng(2).normal(0, 0.05, (64, 96)).astype(np.float32)
    tensor = encode_tensor(CODECS["ggml_blocks"], weights, {"type": kind}, dtype="f32")
    ingot.save(tmp_path / "a.gguf", {WEIGHT: replace(tensor, name=WEIGHT), **DENSE})
    report = ingot.convert(tmp_path / "a.gguf", tmp_path / "folder", format=format, keep_names=True)
    assert report.actions == {"repacked": 1, "moved": 1}
    assert same(wide(tmp_path / "folder"), wide(tmp_path / "a.gguf"))
    ingot.convert(tmp_path / "folder", tmp_path / "back.gguf", keep_names=True)
    with ingot.open(tmp_path / "a.gguf") as one, ingot.open(tmp_path / "back.gguf") as other:
        assert bytes(one[WEIGHT].parts["blocks"].view()) == bytes(other[WEIGHT].parts["blocks"].view())


@pytest.mark.parametrize("scales", ["f16", "bf16"])
def test_offsets_that_are_zero_points_move_out_of_mlx(tmp_path: Path, scales: str) -> None:
    """To AWQ and back: the same integers and zero points; an offset that is no multiple of its scale is refused."""
    rng, kind = np.random.default_rng(5), numpy_dtype(scales)
    layout = AffineLayout(4, Group(64), ROWS_LSB, False, OFFSETS, scales, scales)
    steps, points = np.ldexp(rng.integers(1, 8, 128).astype(np.float32), -9), rng.integers(0, 16, 128)
    codes = rng.integers(0, 256, (64, 64), np.uint8)

    def folder(name: str, zeros: Array) -> Path:
        parts = {"packed_weight": codes, "scales": steps.astype(kind), "zeros": zeros.astype(kind)}
        tensor = Tensor.from_parts(layout, parts, (64, 128), WEIGHT)
        ingot.save(tmp_path / name, {WEIGHT: tensor}, format="mlx")
        return tmp_path / name

    ours = folder("mlx", -steps * points)
    assert ingot.convert(ours, tmp_path / "awq", format="awq").actions == {"repacked": 1}
    assert same(wide(tmp_path / "awq"), wide(ours))
    assert ingot.convert(tmp_path / "awq", tmp_path / "again", format="mlx", keep_names=True).actions == {"repacked": 1}
    assert same(wide(tmp_path / "again"), wide(ours))
    for zeros in (-steps * (points + 0.5), -steps * (points + 16)):
        other = folder(f"other{zeros[0]}", zeros)
        with pytest.raises(IngotError) as caught:
            ingot.convert(other, tmp_path / f"decoded{zeros[0]}", format="awq")
        assert caught.value.rule == "convert.nothing-packed"
        assert "the zero point" in str(caught.value)


def test_zero_points_of_their_own_are_written_as_v2(tmp_path: Path) -> None:
    of = layer(64, 96, 4, 32)
    ingot.convert(gptq(tmp_path / "m", of, 32), tmp_path / "m.zt")
    ingot.convert(tmp_path / "m.zt", tmp_path / "back", format="gptq")
    stated = json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"]
    assert (stated["checkpoint_format"], stated["sym"]) == ("gptq_v2", False)
    assert same(
        load_file(tmp_path / "back" / "model.safetensors")[f"{NAME}.qzeros"],
        packing.gptq("x", of, less=False)["x.qzeros"],
    )
    assert same(values(tmp_path / "back"), of.values)


def test_columns_in_another_order(tmp_path: Path) -> None:
    order = np.random.default_rng(1).permutation(np.arange(128) // 32)
    of = layer(64, 128, 4, 32, order=order)
    path = gptq(tmp_path / "m", of, 32)
    assert same(values(path), of.values)
    report = ingot.convert(path, tmp_path / "m.zt")
    assert [tensor.action for tensor in report.tensors] == ["moved", "moved"]
    assert same(values(tmp_path / "m.zt"), of.values)
    ingot.convert(tmp_path / "m.zt", tmp_path / "back", format="gptq")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"]["desc_act"]
    assert same(values(tmp_path / "back"), of.values)
    ingot.convert(path, tmp_path / "dense", format="safetensors")
    assert same(values(tmp_path / "dense"), of.values)
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())


def test_a_scale_per_row_and_old_files(tmp_path: Path) -> None:
    of = layer(64, 96, 4, 96, sym=True)
    entries = {**DENSE, **packing.gptq(NAME, of)}
    del entries[f"{NAME}.g_idx"]
    path = packing.folder(tmp_path / "m", entries, {})
    (path / "config.json").write_text("{}")
    (path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": -1, "desc_act": False}))
    assert same(values(path), of.values)
    ingot.convert(path, tmp_path / "dense", format="safetensors")  # the old file goes along, and says nothing any more
    with ingot.open(tmp_path / "dense") as checkpoint:
        assert checkpoint.format == "safetensors"


def test_layers_that_differ(tmp_path: Path) -> None:
    """Bits and groups by ``dynamic`` are what shapes and g_idx say; the pattern is never run."""
    other = "model.layers.0.mlp.down_proj"
    of, second = layer(64, 128, 4, 32, sym=True), layer(64, 128, 8, 64, sym=True)
    entries = {**DENSE, **packing.gptq(NAME, of), **packing.gptq(other, second)}
    stated = gptq_config(of, 32, dynamic={"+:(a+)+$": {"bits": 8, "group_size": 64}})
    path = packing.folder(tmp_path / "m", entries, stated)
    ingot.convert(path, tmp_path / "m.zt")
    ingot.convert(tmp_path / "m.zt", tmp_path / "back", format="gptq")
    for folder in ("m", "m.zt", "back"):
        with ingot.open(tmp_path / folder) as checkpoint:
            assert same(checkpoint[WEIGHT].numpy(), of.values)
            assert same(checkpoint[f"{other}.weight"].numpy(), second.values)
    assert len(json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"]["dynamic"]) == 1


@pytest.mark.parametrize("version", ["gemm", "gemv"])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_awq_s_values(tmp_path: Path, version: str, group: int) -> None:
    of = layer(64, 256, 4, group)
    path = awq(tmp_path / "m", of, group, version)
    assert same(values(path), of.values)
    assert same(values(path, io="pread"), of.values)
    ingot.convert(path, tmp_path / "m.zt")
    ingot.convert(tmp_path / "m.zt", tmp_path / "back", format="awq")
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert all(same(after[name], entry) for name, entry in packing.awq(NAME, of).items())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("cols", [128, 96])
def test_pack_quantized_s_values(tmp_path: Path, bits: int, sym: bool, cols: int) -> None:
    of = layer(40, cols, bits, 32, sym=sym)
    path = packed(tmp_path / "m", of, 32, sym=sym)
    assert same(values(path), of.values)
    assert same(values(path, io="pread"), of.values)
    ingot.convert(path, tmp_path / "m.zt")
    ingot.convert(tmp_path / "m.zt", tmp_path / "back", format="compressed-tensors")
    before, after = load_file(path / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert set(before) == set(after)
    assert all(same(before[name], after[name]) for name in before)


def test_three_bits_in_words_of_ten_codes(tmp_path: Path) -> None:
    """As compressed-tensors packed before it crossed words: told by the width."""
    of = layer(8, 64, 3, 32, sym=True)
    entries = packing.pack_quantized(NAME, of, sym=True)
    padded = np.zeros((8, 70), int)
    padded[:, :64] = of.codes
    loose = np.array([[packing.words(ten, 3)[0] for ten in row.reshape(-1, 10)] for row in padded], np.uint32)
    entries[f"{NAME}.weight_packed"] = loose.view(np.int32)
    path = packing.folder(tmp_path / "m", {**DENSE, **entries}, ct_config(3, 32, sym=True))
    assert same(values(path), of.values)


@pytest.mark.parametrize("strategy", ["tensor", "channel", "group", "block"])
@pytest.mark.parametrize("zeros", [False, True])
def test_int_quantized_s_values(tmp_path: Path, strategy: str, zeros: bool) -> None:
    if strategy == "block" and zeros:
        return
    rng = np.random.default_rng(3)
    codes = rng.integers(-128, 128, (16, 64)).astype(np.int8)
    shape = {"tensor": (1,), "channel": (16, 1), "group": (16, 2), "block": (2, 2)}[strategy]
    scale = rng.uniform(0.01, 0.1, shape).astype(np.float16)
    points = rng.integers(-20, 20, shape).astype(np.int8) if zeros else np.zeros(shape, np.int8)
    wide = [
        np.repeat(np.repeat(item.reshape(-1, shape[-1]), 16 * shape[-1] // item.size, 0), 64 // shape[-1], 1)
        for item in (scale, points)
    ]
    expected = ((codes.astype(np.float32) - wide[1]) * wide[0].astype(np.float32)).astype(np.float16)
    entries = {**DENSE, f"{NAME}.weight": codes, f"{NAME}.weight_scale": scale}
    if zeros:
        entries[f"{NAME}.weight_zero_point"] = points
    path = packing.folder(tmp_path / "m", entries, ct_config(8, None, sym=not zeros, format="int-quantized"))
    assert same(values(path), expected)
    ingot.convert(path, tmp_path / "m.zt")
    assert same(values(tmp_path / "m.zt"), expected)


@pytest.mark.parametrize("sym", [True, False])
def test_integers_move_from_one_to_the_next(tmp_path: Path, sym: bool) -> None:
    of = layer(64, 128, 4, 32, sym=sym)
    path = gptq(tmp_path / "gptq", of, 32)
    for format in ("awq", "compressed-tensors", "squizd", "gptq", *(("mlx",) if sym else ()), "zt"):
        target = tmp_path / (f"{format}2" if format not in ("zt", "squizd") else f"m.{format}")
        report = ingot.convert(path, target, format=format, keep_names=True)
        assert {tensor.action for tensor in report.tensors} <= {"moved", "repacked"}, format
        with ingot.open(target) as checkpoint:
            assert checkpoint.format == format
            assert np.array_equal(checkpoint[WEIGHT].numpy("f32").astype(np.float16), of.values)
        if format != "mlx":
            path = target


def broken(change: Callable[[dict[str, Array], dict[str, Any]], object], kind: str, path: Path) -> str | None:
    of = layer(64, 64, 4, 32)
    entries, stated = {
        "gptq": (packing.gptq(NAME, of), gptq_config(of, 32)),
        "awq": (packing.awq(NAME, of), {"quant_method": "awq", "bits": 4, "group_size": 32}),
        "ct": (packing.pack_quantized(NAME, of, sym=False), ct_config(4, 32, sym=False)),
    }[kind]
    change(entries, stated)
    packing.folder(path, {name: np.ascontiguousarray(entry) for name, entry in entries.items()}, stated)
    with pytest.raises(IngotError) as caught:
        ingot.open(path)
    return caught.value.rule


def put(name: str, value: Array) -> Callable[[dict[str, Array], dict[str, Any]], object]:
    return lambda entries, stated: entries.update({f"{NAME}.{name}": value})


def drop(name: str) -> Callable[[dict[str, Array], dict[str, Any]], object]:
    return lambda entries, stated: entries.pop(f"{NAME}.{name}")


def say(**more: Any) -> Callable[[dict[str, Array], dict[str, Any]], object]:
    return lambda entries, stated: stated.update(more)


I32 = np.int32


@pytest.mark.parametrize(
    ("kind", "change", "rule"),
    [
        ("gptq", drop("qzeros"), "gptq.parts"),
        ("gptq", drop("scales"), "gptq.parts"),
        ("gptq", put("weight", np.ones((64, 64), np.float16)), "gptq.parts"),
        ("gptq", put("qweight", np.zeros((8, 64), np.int64)), "gptq.dtype"),
        ("gptq", put("scales", np.zeros((2, 64), I32)), "gptq.dtype"),
        ("gptq", put("qweight", np.zeros(512, I32)), "gptq.shape"),
        ("gptq", put("qweight", np.zeros((8, 32), I32)), "gptq.shape"),
        ("gptq", put("qzeros", np.zeros((2, 4), I32)), "gptq.shape"),
        ("gptq", put("g_idx", np.full(64, 2, I32)), "gptq.order"),
        ("gptq", put("g_idx", np.full(64, -1, I32)), "gptq.order"),
        ("gptq", put("g_idx", np.zeros(32, I32)), "gptq.shape"),
        ("gptq", put("g_idx", np.zeros(0, I32)), "gptq.dtype"),
        ("gptq", put("g_idx", np.zeros(64, np.float32)), "gptq.dtype"),
        ("gptq", say(bits=8), "gptq.shape"),
        ("gptq", say(bits=5), "gptq.bits"),
        ("gptq", say(bits="4"), "gptq.config"),
        ("gptq", say(bits=True), "gptq.config"),
        ("gptq", say(group_size=0), "gptq.config"),
        ("gptq", say(group_size=64), "gptq.shape"),
        ("gptq", say(group_size=-1), "gptq.shape"),
        ("gptq", say(checkpoint_format="marlin"), "gptq.format"),
        ("gptq", say(checkpoint_format=["gptq"]), "gptq.format"),
        ("awq", drop("qzeros"), "awq.parts"),
        ("awq", put("qweight", np.zeros((64, 7), I32)), "awq.shape"),
        ("awq", put("scales", np.zeros((64, 2), np.float16)), "awq.shape"),
        ("awq", say(bits=8), "awq.config"),
        ("awq", say(version="gemv_fast"), "awq.version"),
        ("awq", say(version="gemv"), "awq.shape"),
        ("ct", drop("weight_shape"), "compressed-tensors.parts"),
        ("ct", drop("weight_scale"), "compressed-tensors.parts"),
        ("ct", put("weight_shape", np.array([64, -64])), "compressed-tensors.shape"),
        ("ct", put("weight_shape", np.array([64, 65])), "compressed-tensors.shape"),
        ("ct", put("weight_shape", np.array([2**40, 64])), "compressed-tensors.shape"),
        ("ct", put("weight_packed", np.zeros((64, 16), I32)), "compressed-tensors.shape"),
        ("ct", put("weight_packed", np.zeros((64, 8), np.uint8)), "compressed-tensors.format"),
        ("ct", put("weight_scale", np.zeros((64, 5), np.float16)), "compressed-tensors.shape"),
        ("ct", put("weight_zero_point", np.zeros((4, 2), I32)), "compressed-tensors.shape"),
        ("ct", put("weight_g_idx", np.full(64, 9, I32)), "compressed-tensors.order"),
        ("ct", put("weight_g_idx", np.zeros(3, I32)), "compressed-tensors.order"),
        (
            "ct",
            lambda entries, stated: stated["config_groups"]["group_0"]["weights"].update(num_bits=99),
            "compressed-tensors.config",
        ),
        ("ct", say(config_groups=[]), "compressed-tensors.shape"),
        ("ct", say(config_groups="pack-quantized"), "interop.config-key"),
        ("ct", say(config_groups=[4, 32]), "interop.config-key"),
        ("ct", say(format="sparse-bitmask"), "model.quantized"),
        ("ct", say(format=["pack-quantized"]), "model.quantized"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, kind: str, change: Any, rule: str) -> None:
    assert broken(change, kind, tmp_path / "m") == rule


def test_columns_of_compressed_tensors_in_another_order(tmp_path: Path) -> None:
    order = np.random.default_rng(2).permutation(np.arange(64) // 32)
    of = layer(32, 64, 4, 32, sym=True, order=order)
    entries = {**DENSE, **packing.pack_quantized(NAME, of, sym=True, ordered=True)}
    path = packing.folder(tmp_path / "m", entries, ct_config(4, 32, sym=True))
    assert same(values(path), of.values)
    entries[f"{NAME}.weight_g_idx"][:] = -1  # as it is before it is set
    of.order = np.arange(64) // 32
    assert same(values(packing.folder(tmp_path / "n", entries, ct_config(4, 32, sym=True))), of.values)


def test_other_layouts_of_a_convolution_are_not_read(tmp_path: Path) -> None:
    of = layer(64, 64, 4, 32)
    path = packing.folder(tmp_path / "m", packing.gptq(NAME, of), gptq_config(of, 32))
    (path / "config.json").write_text(json.dumps({"model_type": "gpt2", "quantization_config": gptq_config(of, 32)}))
    with pytest.raises(IngotError) as caught:
        ingot.open(path)
    assert caught.value.rule == "gptq.conv1d"
