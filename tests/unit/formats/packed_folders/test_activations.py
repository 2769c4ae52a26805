"""What config.json says of activations and of caches: kept where it still holds, else told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import ingot

from . import packing
from .packing import Array, layer

E4M3 = ml_dtypes.float8_e4m3fn
DENSE: dict[str, Array] = {"model.norm.weight": np.ones(4, np.float16)}
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
DYNAMIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
CODES = np.arange(-64 * 32, 64 * 32).reshape(64, 64).astype(np.int8)
RNG = np.random.default_rng(4)


def int8(stem: str) -> dict[str, Array]:
    return {f"{stem}.weight": CODES, f"{stem}.weight_scale": RNG.uniform(0.01, 0.1, (64, 1)).astype(np.float16)}


def int4(stem: str) -> dict[str, Array]:
    return packing.pack_quantized(stem, layer(64, 64, 4, 32, sym=True), sym=True)


def fp8(stem: str, scale: tuple[int, ...] = (1,), name: str = "weight_scale") -> dict[str, Array]:
    codes = RNG.integers(0, 120, (128, 128), dtype=np.uint8).view(E4M3)
    return {f"{stem}.weight": codes, f"{stem}.{name}": np.full(scale, 0.5, np.float32)}


def group(weights: Mapping[str, Any], inputs: Any, *targets: str) -> dict[str, Any]:
    return {"targets": list(targets) or ["Linear"], "weights": dict(weights), "input_activations": inputs}


ROWS = 'options = { bits = 8, group = "row", symmetric = true, scales = "f16" }'
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "tensor"}


def stated(*groups: Mapping[str, Any], format: str = "mixed-precision", **more: Any) -> dict[str, Any]:
    numbered = {f"group_{number}": item for number, item in enumerate(groups)}
    known = {"quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"]}
    return {**known, "config_groups": numbered, **more}


def folder(path: Path, entries: Mapping[str, Array], quantization: dict[str, Any]) -> Path:
    ingot_entries = {**DENSE, **entries}
    path.mkdir()
    ingot.save(path / "model.safetensors", ingot_entries)
    (path / "config.json").write_text(
        json.dumps({"model_type": "llama", "model_file": "llama.py", "quantization_config": quantization})
    )
    return path


def converted(source: Path, format: str, recipe: str | None = None) -> tuple[dict[str, Any], str]:
    """What the result's config.json says of packing, and the note of what is not carried."""
    target = source.with_name(f"{source.name}-{format}")
    report = ingot.convert(source, target, recipe, format=format)
    (found,) = [note for note in report.notes if "not carried into" in note] or [""]
    config = json.loads((target / "config.json").read_text())
    return config.get("quantization_config", {}), found


def inputs_by_layer(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: item["input_activations"] for item in config["config_groups"].values() for name in item["targets"]}


@pytest.mark.parametrize(
    ("weights", "entries", "inputs"),
    [
        (INT8, int8(UP), DYNAMIC),
        (FLOAT8, {**fp8(UP), f"{UP}.input_scale": np.ones(1, np.float32)}, STATIC),
        ({**FLOAT8, "strategy": "channel"}, fp8(UP, (128, 1)), {**STATIC, "strategy": "token", "dynamic": True}),
    ],
    ids=["w8a8-int8", "fp8-static", "fp8-dynamic"],
)
def test_settings_stay_between_folders_of_compressed_tensors(
    weights: dict[str, Any], entries: dict[str, Array], inputs: dict[str, Any], tmp_path: Path
) -> None:
    more = {"kv_cache_scheme": KV, "ignore": ["lm_head", "re:.*router"]}
    source = folder(tmp_path / "in", entries, stated(group(weights, inputs), format="int-quantized", **more))
    config, note = converted(source, "compressed-tensors")
    assert inputs_by_layer(config) == {"Linear": inputs}
    assert (config["kv_cache_scheme"], config["ignore"]) == (KV, ["lm_head", "re:.*router"])
    assert not note
    for format in ("zt", "mlx"):
        other, note = converted(source, format)
        assert not other.get("config_groups")
        assert "input_activations" in note
        assert "kv_cache_scheme" in note


def test_each_group_keeps_its_own(tmp_path: Path) -> None:
    """Of mixed precision; a layer of another form now, or one that was dense, has nothing of a group that fits it."""
    stems = [f"model.layers.{number}.mlp.up_proj" for number in range(3)]
    plain = {f"{DOWN}.weight": RNG.normal(0, 0.1, (64, 64)).astype(np.float16)}
    entries = {**int8(stems[0]), **int8(stems[1]), **int4(stems[2]), **plain}
    groups = (group(INT8, DYNAMIC, "re:.*layers.[01].*"), group(INT4, None, "re:.*layers.2.*"))
    source = folder(tmp_path / "in", entries, stated(*groups))
    config, note = converted(source, "compressed-tensors")
    assert inputs_by_layer(config) == {stems[0]: DYNAMIC, stems[1]: DYNAMIC, stems[2]: None}
    assert not note
    with ingot.open(source) as checkpoint:
        assert len([name for name in checkpoint if checkpoint[name].codec != "dense"]) == 3
    recipe = tmp_path / "x.toml"
    rules = (f'match = "{stems[1]}.weight"\ncodec = "dense"', f'match = "{DOWN}.weight"\ncodec = "affine"\n{ROWS}')
    recipe.write_text('name = "x"\n' + "".join(f"[[rules]]\n{rule}\n" for rule in rules))
    source.rename(tmp_path / "again")
    config, note = converted(tmp_path / "again", "compressed-tensors", str(recipe))
    assert inputs_by_layer(config) == {stems[0]: DYNAMIC, stems[2]: None, DOWN: None}
    assert {config["config_groups"][key]["weights"]["num_bits"] for key in config["config_groups"]} == {4, 8}
    assert sorted(config["ignore"]) == ["lm_head", stems[1]]
    assert "input_activations" in note
    assert "1 layers" in note


def test_groups_that_only_expressions_tell_apart_are_told(tmp_path: Path) -> None:
    other = {**DYNAMIC, "strategy": "tensor"}
    groups = (group(INT8, DYNAMIC, "re:.*up.*"), group(INT8, other, "re:.*down.*"))
    source = folder(tmp_path / "in", {**int8(UP), **int8(DOWN)}, stated(*groups))
    config, note = converted(source, "compressed-tensors")
    assert inputs_by_layer(config) == {"Linear": None}
    assert "input_activations" in note
    named = (group(INT8, DYNAMIC, UP), group(INT8, other, DOWN))
    config, note = converted(
        folder(tmp_path / "named", {**int8(UP), **int8(DOWN)}, stated(*named)), "compressed-tensors"
    )
    assert inputs_by_layer(config) == {UP: DYNAMIC, DOWN: other}
    assert not note


def test_static_scales_of_fp8(tmp_path: Path) -> None:
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"}
    blocks = {**fp8(UP, (1, 1), "weight_scale_inv"), **fp8(DOWN, (1, 1), "weight_scale_inv")}
    scales = {f"{stem}.input_scale": np.ones(1, np.float32) for stem in (UP, DOWN)}
    config, note = converted(folder(tmp_path / "all", {**blocks, **scales}, quantization), "fp8")
    assert config["activation_scheme"] == "static"
    assert not note
    del scales[f"{UP}.input_scale"]
    config, note = converted(folder(tmp_path / "some", {**blocks, **scales}, quantization), "fp8")
    assert config["activation_scheme"] == "dynamic"
    assert "activation_scheme (static)" in note


def test_inputs_that_have_one_scale_stay_static(tmp_path: Path) -> None:
    """Beside weights that have one: from fp8 and from ModelOpt, by way of `.zt` too; what is dynamic is no loss."""
    entries = {**fp8(UP, ()), f"{UP}.input_scale": np.ones((), np.float32)}
    theirs = {"quant_method": "modelopt", "quant_algo": "FP8"}
    ours = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    for number, quantization in enumerate((theirs, ours)):
        source = folder(tmp_path / str(number), entries, quantization)
        config, _ = converted(source, "fp8")
        assert (config["activation_scheme"], config["weight_block_size"]) == ("static", None)
        ingot.convert(source, tmp_path / f"{number}-zt", format="zt")
        assert converted(tmp_path / f"{number}-zt", "fp8")[0] == config
    other = folder(tmp_path / "2", entries, {**ours, "activation_scheme": "dynamic"})
    config, note = converted(other, "fp8")
    assert config["activation_scheme"] == "dynamic"
    for format in ("fp8", "compressed-tensors", "zt"):
        assert not note
        _, note = converted(other.rename(tmp_path / f"from-{format}"), format)
        other = tmp_path / f"from-{format}"
    assert not note


@pytest.mark.parametrize("format", ["compressed-tensors", "fp8", "modelopt", "bitsandbytes"])
@pytest.mark.parametrize(
    ("config", "head", "names"),
    [
        ({"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}, False, True),
        ({"architectures": ["LlamaForCausalLM"]}, False, True),
        ({"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}, False, False),
        ({"architectures": ["BertModel"]}, False, False),
        ({"architectures": ["LlamaForCausalLM"]}, True, True),  # a dense matrix of its own
    ],
)
def test_tied_heads_are_dense(format: str, config: dict[str, Any], head: bool, names: bool, tmp_path: Path) -> None:
    """A loader with a list of what is dense would look for packed weights of all others; by way of `.zt`."""
    options = {
        "modelopt": 'table = "f8_e4m3fn", group = "tensor"',
        "bitsandbytes": 'table = "nf4", group = 64, flat = true, order = "high_first"',
    }.get(format, 'table = "f8_e4m3fn", group = [128, 128]')
    weights = {"model.embed_tokens.weight": np.ones((16, 64), np.float16), f"{UP}.weight": np.eye(64, dtype=np.float16)}
    weights |= {"lm_head.weight": np.ones((16, 64), np.float16)} if head else {}
    (tmp_path / "in").mkdir()
    ingot.save(tmp_path / "in" / "model.safetensors", weights)
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    rule = f'match = "{UP}.weight"\ncodec = "scaled_codebook"\noptions = {{ {options} }}'
    (tmp_path / "r.toml").write_text(f'name = "x"\n[[rules]]\n{rule}\n')
    ingot.convert(tmp_path / "in", tmp_path / "zt", tmp_path / "r.toml", format="zt")
    report = ingot.convert(tmp_path / "zt", tmp_path / "out", format=format)
    assert "decoded" not in report.actions
    stated = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    key = {"compressed-tensors": "ignore", "modelopt": "ignore", "fp8": "modules_to_not_convert"}
    assert ("lm_head" in stated[key.get(format, "llm_int8_skip_modules")]) is names


def test_caches_of_modelopt(tmp_path: Path) -> None:
    quantization = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    quantization["kv_cache_scheme"] = KV
    entries = {**fp8(UP, ()), f"{UP}.input_scale": np.ones((), np.float32)}
    source = folder(tmp_path / "in", entries, quantization)
    config, note = converted(source, "modelopt")
    assert (config["kv_cache_quant_algo"], config["kv_cache_scheme"]) == ("FP8", KV)
    assert not note
    config, note = converted(source, "compressed-tensors")
    assert config["kv_cache_scheme"] is None
    assert all(key in note for key in ("kv_cache_quant_algo", "kv_cache_scheme", "quant_algo (FP8)"))


def test_parts_of_a_weight_in_several_shards(tmp_path: Path) -> None:
    """Codes in one file, scales in another, as naive-quantized has them: what one file gives."""
    entries = {**DENSE, **int8(UP), **int4(DOWN)}
    config = stated(group(INT8, DYNAMIC), group(INT4, None), format="naive-quantized")
    whole = folder(tmp_path / "whole", entries, config)
    parts = folder(tmp_path / "parts", {}, config)
    (parts / "model.safetensors").unlink()
    names = sorted(entries)
    files = [f"model-0000{number + 1}-of-00002.safetensors" for number in range(2)]
    for number, file in enumerate(files):
        save_file({name: entries[name] for name in names[number::2]}, parts / file)
    weight_map = {name: files[index % 2] for index, name in enumerate(names)}
    assert weight_map[f"{UP}.weight"] != weight_map[f"{UP}.weight_scale"]
    assert len({weight_map[name] for name in int4(DOWN)}) == 2
    (parts / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    with ingot.open(whole) as one, ingot.open(parts) as other:
        assert set(one) == set(other) == {"model.norm.weight", f"{UP}.weight", f"{DOWN}.weight"}
        assert all(one[name].numpy().tobytes() == other[name].numpy().tobytes() for name in one)
        wanted = CODES.astype(np.float32) * entries[f"{UP}.weight_scale"].astype(np.float32)
        assert np.array_equal(other[f"{UP}.weight"].numpy(), wanted.astype(np.float16))
        of = layer(64, 64, 4, 32, sym=True)
        assert np.array_equal(other[f"{DOWN}.weight"].numpy("f16"), of.values)
