"""Folders of FP8, MXFP4, NVFP4 and bitsandbytes: decoded as their layouts say; hostile ones are refused by rule."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.errors import IngotError, UnsupportedError
from ingot.model.layouts.scaled_codebook import NF4

BF16, E4M3, E5M2 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
E8M0, E2M1 = ml_dtypes.float8_e8m0fnu, ml_dtypes.float4_e2m1fn
Arrays = dict[str, np.ndarray]
RNG = np.random.default_rng(5)


def made(folder: Path, tensors: Mapping[str, np.ndarray], quantization: Mapping[str, Any], **config: Any) -> Path:
    """A folder as another program writes it."""
    folder.mkdir(exist_ok=True)
    ingot.save(folder / "model.safetensors", {"norm": np.ones(4, BF16), **tensors}, overwrite=True)
    stated = {"model_type": "llama", **config, "quantization_config": dict(quantization)}
    (folder / "config.json").write_text(json.dumps(stated))
    return folder


def stored(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """What the one file of a folder has, by name: type, shape, bytes."""
    raw = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    entries = {name: entry for name, entry in json.loads(raw[8:start]).items() if name != "__metadata__"}
    return {
        name: (entry["dtype"], entry["shape"], raw[slice(*(start + at for at in entry["data_offsets"]))])
        for name, entry in entries.items()
    }


def codes(*shape: int, most: int = 256) -> np.ndarray:
    return RNG.integers(0, most, shape, dtype=np.uint8)


def nibbles(packed: np.ndarray, *, high: bool = False) -> np.ndarray:
    pair = (packed >> 4, packed & 15) if high else (packed & 15, packed >> 4)
    return np.stack(pair, -1).reshape(*packed.shape[:-1], -1)


def e2m1(packed: np.ndarray) -> np.ndarray:
    return nibbles(packed).view(E2M1).astype(np.float32)


FP8_CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128]}
WEIGHT = codes(130, 200, most=120).view(E4M3)
SCALES = RNG.normal(0, 0.01, (2, 2)).astype(np.float32)
STACK = codes(3, 4, 130, most=120).view(E4M3)


def fp8(scales: np.ndarray, suffix: str = "weight_scale_inv", weight: np.ndarray = WEIGHT) -> Arrays:
    return {"l.weight": weight, f"l.{suffix}": scales}


def spread(scales: np.ndarray) -> np.ndarray:
    return scales.astype(np.float32).repeat(128, -2)[..., :130, :].repeat(128, -1)[..., :200]


def blocks() -> tuple[Arrays, Any, str, np.ndarray]:
    return fp8(SCALES), FP8_CONFIG, "l.weight", WEIGHT.astype(np.float32) * spread(SCALES)


def powers() -> tuple[Arrays, Any, str, np.ndarray]:
    scales = codes(2, 2, most=140).view(E8M0)
    return fp8(scales), FP8_CONFIG, "l.weight", WEIGHT.astype(np.float32) * spread(scales)


def per_tensor() -> tuple[Arrays, Any, str, np.ndarray]:
    return (
        fp8(np.float32(0.3), "weight_scale"),
        {"quant_method": "fp8"},
        "l.weight",
        WEIGHT.astype(np.float32) * np.float32(0.3),
    )


def per_row() -> tuple[Arrays, Any, str, np.ndarray]:
    scales = RNG.normal(0, 1e-3, (130, 1)).astype(np.float32)
    weight = WEIGHT.view(np.uint8).view(E5M2)
    tensors = fp8(scales, "weight_scale", weight)
    return tensors, {"quant_method": "fbgemm_fp8"}, "l.weight", weight.astype(np.float32) * scales


def stacked() -> tuple[Arrays, Any, str, np.ndarray]:
    scales = RNG.normal(0, 1, (3, 1, 2)).astype(np.float32)
    wide = scales.repeat(4, 1).repeat(128, 2)[:, :, :130]
    tensors = {"e.up_proj": STACK, "e.up_proj_scale_inv": scales}
    return tensors, FP8_CONFIG, "e.up_proj", STACK.astype(np.float32) * wide


def gpt_oss() -> tuple[Arrays, Any, str, np.ndarray]:
    packed, scales = codes(2, 6, 3, 16), codes(2, 6, 3, most=130)
    values = e2m1(packed) * scales.view(E8M0).astype(np.float32)[..., None]
    tensors = {"e.up_proj_blocks": packed, "e.up_proj_scales": scales}
    return tensors, {"quant_method": "mxfp4"}, "e.up_proj", values.reshape(2, 6, 96).swapaxes(1, 2)


def nvfp4() -> tuple[Arrays, Any, str, np.ndarray]:
    packed, scales, second = codes(6, 16), codes(6, 2, most=120).view(E4M3), np.float32(0.0123)
    wide = scales.astype(np.float32) * second
    values = (e2m1(packed).reshape(6, 2, 16) * wide[..., None]).reshape(6, 32)
    tensors = {"l.weight": packed, "l.weight_scale": scales, "l.weight_scale_2": second}
    return tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "l.weight", values


def modelopt_fp8() -> tuple[Arrays, Any, str, np.ndarray]:
    tensors, _, name, values = per_tensor()
    return tensors, {"quant_method": "modelopt", "quant_algo": "FP8"}, name, values


BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def state(**changes: Any) -> np.ndarray:
    found = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [7, 15], **changes}
    return np.frombuffer(json.dumps(found).encode(), np.uint8)


def nf4(**changes: Any) -> tuple[Arrays, Any, str, np.ndarray]:
    packed, absmax = codes(53, 1), RNG.normal(0, 1, 2).astype(np.float32)
    table = np.array(NF4, np.float32)
    values = table[nibbles(packed.reshape(-1), high=True)[:105]] * absmax.repeat(64)[:105]
    tensors = {"l.weight": packed, "l.weight.absmax": absmax, "l.weight.quant_map": table}
    tensors["l.weight.quant_state.bitsandbytes__nf4"] = state(**changes)
    return tensors, BNB, "l.weight", values.reshape(7, 15)


def nested() -> tuple[Arrays, Any, str, np.ndarray]:
    tensors, config, name, _ = nf4(nested_blocksize=256, nested_dtype="float32", nested_offset=0.25)
    table, outer = RNG.normal(0, 1, 256).astype(np.float32), np.array([1.7], np.float32)
    tensors |= {"l.weight.absmax": codes(2), "l.weight.nested_absmax": outer, "l.weight.nested_quant_map": table}
    absmax = table[tensors["l.weight.absmax"]] * outer + np.float32(0.25)
    values = np.array(NF4, np.float32)[nibbles(tensors[name].reshape(-1), high=True)[:105]] * absmax.repeat(64)[:105]
    return tensors, config, name, values.reshape(7, 15)


def int8() -> tuple[Arrays, Any, str, np.ndarray]:
    weight, scb = codes(5, 6).view(np.int8), RNG.normal(0, 9, 5).astype(np.float32)
    values = weight.astype(np.float32) * scb[:, None] * np.float32(7.874015718698502e-3)
    tensors = {"l.weight": weight, "l.SCB": scb, "l.weight_format": np.zeros((), np.uint8)}
    return tensors, {"quant_method": "bitsandbytes", "load_in_8bit": True}, "l.weight", values


CASES = (blocks, powers, per_tensor, per_row, stacked, gpt_oss, nvfp4, modelopt_fp8, nf4, nested, int8)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_values_are_those_of_the_layout(
    case: Callable[[], tuple[Arrays, Any, str, np.ndarray]], tmp_path: Path
) -> None:
    tensors, config, name, wanted = case()
    folder = made(tmp_path / "in", tensors, config, torch_dtype="float16")
    ingot.convert(folder, tmp_path / "moved.zt")
    for path in (folder, tmp_path / "moved.zt"):
        with ingot.open(path) as checkpoint:
            assert set(checkpoint) == {"norm", name}
            assert checkpoint[name].codec == "scaled_codebook"
            assert checkpoint[name].dtype == (
                "bf16" if "bitsandbytes" in str(config) and "4bit" in str(config) else "f16"
            )
            assert checkpoint[name].numpy("f32").tobytes() == np.ascontiguousarray(wanted).tobytes()
    assert not [item for item in ingot.verify(folder) if item.level == "error"]
    report = ingot.convert(folder, tmp_path / "dense", "decompress", "safetensors")
    assert report.tensors
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())


def without(case: tuple[Arrays, Any, str, np.ndarray], key: str) -> tuple[Arrays, Any]:
    return {name: value for name, value in case[0].items() if name != key}, case[1]


def but(case: tuple[Arrays, Any, str, np.ndarray], config: Mapping[str, Any] | None = None, **changes: Any) -> Any:
    """The case with tensors replaced: ``l__weight`` for ``l.weight``."""
    changed = {key.replace("__", "."): value for key, value in changes.items()}
    return {**case[0], **changed}, {**case[1], **(config or {})}


STATE = "l.weight.quant_state.bitsandbytes__nf4"
HOSTILE = (
    ("fp8.parts", lambda: without(blocks(), "l.weight_scale_inv")),
    ("fp8.shape", lambda: but(blocks(), l__weight_scale_inv=np.ones((2, 3), np.float32))),
    ("fp8.shape", lambda: but(blocks(), {"weight_block_size": [64, 128]})),
    ("fp8.shape", lambda: but(blocks(), {"weight_block_size": None})),
    ("fp8.config", lambda: but(blocks(), {"weight_block_size": [0, 128]})),
    ("fp8.config", lambda: but(blocks(), {"weight_block_size": [2**70, 128]})),
    ("fp8.config", lambda: but(blocks(), {"weight_block_size": 128})),
    ("fp8.dtype", lambda: but(blocks(), l__weight_scale_inv=np.ones((2, 2), np.int32))),
    ("fp8.shape", lambda: but(blocks(), l__weight=WEIGHT.reshape(-1))),
    ("mxfp4.parts", lambda: without(gpt_oss(), "e.up_proj_scales")),
    ("mxfp4.shape", lambda: ({**gpt_oss()[0], "e.up_proj_scales": codes(2, 6, 4)}, gpt_oss()[1])),
    ("mxfp4.shape", lambda: ({**gpt_oss()[0], "e.up_proj_blocks": codes(2, 6, 6, 8)}, gpt_oss()[1])),
    ("mxfp4.dtype", lambda: ({**gpt_oss()[0], "e.up_proj_scales": np.ones((2, 6, 3), np.float32)}, gpt_oss()[1])),
    ("modelopt.parts", lambda: without(nvfp4(), "l.weight_scale_2")),
    ("modelopt.parts", lambda: without(nvfp4(), "l.weight_scale")),
    ("modelopt.shape", lambda: but(nvfp4(), l__weight_scale_2=np.ones(2, np.float32))),
    ("modelopt.shape", lambda: but(nvfp4(), l__weight_scale=codes(6, 3).view(E4M3))),
    ("modelopt.dtype", lambda: but(nvfp4(), l__weight_scale=np.ones((6, 2), np.float32))),
    ("modelopt.algorithm", lambda: but(nvfp4(), {"quant_algo": "W4A8_AWQ"})),
    ("bitsandbytes.parts", lambda: without(nf4(), "l.weight.quant_map")),
    ("bitsandbytes.parts", lambda: without(nf4(), STATE)),
    ("bitsandbytes.parts", lambda: without(nested(), "l.weight.nested_absmax")),
    ("bitsandbytes.shape", lambda: nf4(shape=[7, 16])[:2]),
    ("bitsandbytes.state", lambda: nf4(shape=[7, -15])[:2]),
    ("bitsandbytes.state", lambda: nf4(shape=[[7]])[:2]),
    ("bitsandbytes.state", lambda: nf4(blocksize=0)[:2]),
    ("bitsandbytes.state", lambda: nf4(dtype="int8")[:2]),
    ("bitsandbytes.state", lambda: ({**nested()[0], STATE: state(nested_blocksize=256, nested_offset="x")}, BNB)),
    ("bitsandbytes.state", lambda: ({**nf4()[0], STATE: codes(9)}, BNB)),
    ("bitsandbytes.shape", lambda: nf4(blocksize=16)[:2]),
    ("bitsandbytes.shape", lambda: ({**nf4()[0], "l.weight.quant_map": np.zeros(15, np.float32)}, BNB)),
    ("bitsandbytes.shape", lambda: ({**int8()[0], "l.SCB": np.ones(6, np.float32)}, int8()[1])),
    ("bitsandbytes.state", lambda: ({**int8()[0], "l.weight_format": np.ones((), np.uint8)}, int8()[1])),
)


def read(folder: Path) -> None:
    with ingot.open(folder) as checkpoint:
        for tensor in checkpoint.values():
            tensor.numpy()


@pytest.mark.parametrize(("rule", "case"), HOSTILE)
def test_hostile_folders(rule: str, case: Callable[[], tuple[Arrays, Any]], tmp_path: Path) -> None:
    folder = made(tmp_path / "in", *case())
    with pytest.raises(IngotError) as caught:
        read(folder)
    assert caught.value.rule == rule


WRITTEN = {
    "fp8": ('{ table = "f8_e4m3fn", group = [128, 128] }', {"l.weight", "l.weight_scale_inv", "e.up_proj", "norm"}),
    "mxfp4": (
        '{ table = "f4_e2m1fn", group = 32, scales = "f8_e8m0fnu", transposed = true }',
        {"l.weight", "e.up_proj_blocks", "e.up_proj_scales", "norm"},
    ),
    "bitsandbytes": (
        '{ flat = true, order = "high_first" }',
        {"l.weight", "l.weight.absmax", "l.weight.quant_map", STATE, "e.up_proj", "norm"},
    ),
    "mlx": (
        '{ table = "f8_e4m3fn", group = 32, scales = "f8_e8m0fnu" }',
        {"l.weight", "l.scales", "e.up_proj", "norm"},
    ),
}


@pytest.mark.parametrize("format", WRITTEN)
def test_recipes_make_what_is_written(format: str, tmp_path: Path) -> None:
    options, keys = WRITTEN[format]
    match = "e.up_proj" if format == "mxfp4" else "l.weight"
    recipe = f'name = "x"\n[[rules]]\nmatch = "{match}"\ncodec = "scaled_codebook"\noptions = {options}\n'
    (tmp_path / "x.toml").write_text(recipe)
    weights = {
        "l.weight": RNG.normal(0, 0.05, (150, 96)).astype(BF16),
        "e.up_proj": RNG.normal(0, 0.05, (2, 64, 6)).astype(BF16),
        "norm": np.ones(4, BF16),
    }
    ingot.save(tmp_path / "in.safetensors", weights)
    ingot.convert(tmp_path / "in.safetensors", tmp_path / "x.zt", tmp_path / "x.toml")
    ingot.convert(tmp_path / "in.safetensors", tmp_path / "direct", tmp_path / "x.toml", format, keep_names=True)
    moved = ingot.convert(tmp_path / "x.zt", tmp_path / "moved", format=format, keep_names=True)
    assert moved.exact
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "direct" / name).read_bytes() == (tmp_path / "moved" / name).read_bytes()
    with ingot.open(tmp_path / "x.zt") as source, ingot.open(tmp_path / "moved") as checkpoint:
        assert checkpoint.format == format
        assert checkpoint[match].codec == "scaled_codebook"
        assert all(checkpoint[name].numpy("f32").tobytes() == source[name].numpy("f32").tobytes() for name in source)
        error = np.square(checkpoint[match].numpy("f32") - weights[match].astype(np.float32)).mean()
        assert error < 0.02 * np.square(weights[match].astype(np.float32)).mean()
    assert set(stored(tmp_path / "moved")) == keys


@pytest.mark.parametrize(
    ("scales", "stated", "wanted"),
    [
        (SCALES, FP8_CONFIG, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
        (np.float32(0.3), {"quant_method": "fp8"}, {"quant_method": "fp8", "weight_block_size": None}),
        (
            codes(130, 1, most=100).astype(np.float32),
            {"quant_method": "fbgemm_fp8", "activation_scale_ub": 900.0},
            {"quant_method": "fbgemm_fp8", "activation_scale_ub": 900.0},
        ),
        (
            codes(130, 5, most=140).view(E8M0),
            {"quant_method": "fp8", "weight_block_size": [1, 40]},
            {"quant_method": "fp8", "weight_block_size": [1, 40], "scale_fmt": "ue8m0"},
        ),
        (
            np.exp2(codes(3, 4, most=9).astype(np.float32)),
            {"quant_method": "fp8", "weight_block_size": [64, 64], "scale_fmt": "ue8m0"},
            {"quant_method": "fp8", "weight_block_size": [64, 64], "scale_fmt": "ue8m0"},
        ),
    ],
)
def test_fp8_is_written_on_its_own_grid(
    scales: np.ndarray, stated: dict[str, Any], wanted: dict[str, Any], tmp_path: Path
) -> None:
    """Blocks of any size, one scale, rows: the bytes that were read, directly and but for words by way of `.zt`."""
    rows = "weight_scale" if stated["quant_method"] != "fp8" else "weight_scale_inv"
    source = made(tmp_path / "in", fp8(scales, rows), stated)
    assert ingot.convert(source, tmp_path / "out", format="fp8").actions == {"moved": 2}
    ingot.convert(source, tmp_path / "x", format="zt")
    ingot.convert(tmp_path / "x", tmp_path / "again", format="fp8")
    for folder in ("out", "again"):
        assert stored(tmp_path / folder) == stored(source)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert {key: config.get(key) for key in (*wanted, "scale_fmt")} == {"scale_fmt": None, **wanted}


def test_fp8_has_one_grid_in_a_folder(tmp_path: Path) -> None:
    """A matrix that is no larger than a block lies on any; others not, but compressed-tensors takes them all."""
    small = {"s.weight": WEIGHT[:128, :128].copy(), "s.weight_scale_inv": np.ones((1, 1), np.float32)}
    source = made(tmp_path / "in", {**fp8(SCALES), **small}, FP8_CONFIG)
    assert ingot.convert(source, tmp_path / "out", format="fp8").actions == {"moved": 3}
    assert stored(tmp_path / "out") == stored(source)
    ingot.convert(made(tmp_path / "one", small, FP8_CONFIG), tmp_path / "alone", format="fp8")
    kept = json.loads((tmp_path / "alone" / "config.json").read_text())["quantization_config"]
    assert kept["weight_block_size"] == [128, 128]
    other = {"s.weight": WEIGHT, "s.weight_scale_inv": np.ones((), np.float32)}
    mixed = made(tmp_path / "mixed", {**fp8(SCALES), **other}, FP8_CONFIG)
    with pytest.raises(UnsupportedError) as caught:
        ingot.convert(mixed, tmp_path / "no", format="fp8")
    assert caught.value.rule == "fp8.mixed"
    assert not (tmp_path / "no").exists()
    assert ingot.convert(mixed, tmp_path / "yes", format="compressed-tensors").actions == {"moved": 3}


def test_stacks_of_experts_in_blocks_are_written(tmp_path: Path) -> None:
    entries, stated, name, values = stacked()
    source = made(tmp_path / "in", entries, stated)
    ingot.convert(source, tmp_path / "out", format="fp8")
    assert stored(tmp_path / "out") == stored(source)
    with ingot.open(tmp_path / "out") as checkpoint:
        assert np.array_equal(checkpoint[name].numpy("f32"), values)
