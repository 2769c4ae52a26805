"""Folders for mlx_lm, against mlx_lm itself: it loads what Ingot writes, and Ingot reads what it writes."""

from __future__ import annotations

import json
import pkgutil
import re
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.codecs.affine.codec import AffineCodec
from ingot.model.tensor import Array
from ingot.testing.codecs import encode_tensor

mx = pytest.importorskip("mlx.core")
mlx_lm = pytest.importorskip("mlx_lm")

from ingot.mlx import load_model  # noqa: E402
from ingot.translate.mlx_families import MODULES, REMAPPED  # noqa: E402

BASE = Path(__file__).parents[3] / "shared" / "models" / "base"
IDS = mx.array([[1, 2, 3, 500, 77, 4000, 9]])


def as_numpy(array: Any) -> Array:
    return np.array(array.astype(mx.float32))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_packing_is_that_of_mlx(bits: int, group: int) -> None:
    """MLX finds the same weights in our words, scales and offsets, in f32; and has no other shapes for its own."""
    rng = np.random.default_rng(bits * group)
    values = rng.normal(0, 1, (5, 256)).astype(np.float32)
    options = {"bits": bits, "group": group, "zero_kind": "offset", "scales": "f32"}
    tensor = encode_tensor(AffineCodec(), values, options, dtype="f32")
    packed = np.frombuffer(tensor.parts["packed_weight"].view(), np.uint32).reshape(5, -1)
    scales, zeros = (tensor.parts[role].array().reshape(5, -1) for role in ("scales", "zeros"))
    theirs = mx.dequantize(mx.array(packed), mx.array(scales), mx.array(zeros), group_size=group, bits=bits)
    assert np.array_equal(as_numpy(theirs), tensor.numpy())
    own = mx.quantize(mx.array(values), group_size=group, bits=bits)
    assert [part.shape for part in own] == [packed.shape, scales.shape, zeros.shape]


@pytest.mark.models
def test_mlx_lm_loads_what_is_written(tmp_path: Path) -> None:
    """Logits are those of the decoded weights up to rounding: MLX decodes the embeddings in f16, their scales' type."""
    wide, folder = tmp_path / "wide", tmp_path / "mlx"
    wide.mkdir()
    with ingot.open(BASE) as checkpoint:
        ingot.save(wide / "model.safetensors", {name: checkpoint[name].numpy("f32") for name in checkpoint})
        copied = [shutil.copy(path, wide) for path in checkpoint.companions.values()]
    assert copied
    ingot.convert(wide, folder, "mlx-4bit", format="mlx")
    model, tokenizer = mlx_lm.load(str(folder))
    assert len(tokenizer.encode("hello")) > 0
    layer = model.model.layers[0].self_attn.q_proj
    with ingot.open(folder) as checkpoint:
        tensor = checkpoint["model.layers.0.self_attn.q_proj.weight"]
        assert np.array(layer.weight).tobytes() == bytes(tensor.parts["packed_weight"].view())
        values = {name: checkpoint[name].numpy() for name in checkpoint}
    plain, _ = mlx_lm.utils.load_model(wide, lazy=True)
    plain.load_weights([(name, mx.array(value)) for name, value in values.items()])
    found, wanted = as_numpy(model(IDS)), as_numpy(plain(IDS))
    assert np.abs(found - wanted).max() <= 1e-3 * np.abs(wanted).max()


@pytest.mark.models
@pytest.mark.parametrize("bits", [3, 4])
def test_what_mlx_lm_writes_is_read(tmp_path: Path, bits: int) -> None:
    """Every tensor: bit for bit where MLX computes in f32, and within its own rounding in bf16 as stored."""
    path = tmp_path / "theirs"
    mlx_lm.convert(str(BASE), str(path), quantize=True, q_bits=bits, q_group_size=32)
    model, _ = mlx_lm.utils.load_model(path)
    layers = dict(model.named_modules())
    with ingot.open(path) as checkpoint:
        assert checkpoint.format == "mlx"
        packed = 0
        for name, tensor in checkpoint.items():
            layer = layers[name.removesuffix(".weight")]
            if tensor.codec == "dense":
                assert np.array_equal(tensor.numpy("f32"), as_numpy(layer.weight))
                continue
            packed += 1
            parts = layer.weight, layer.scales, layer.biases
            wide = mx.dequantize(parts[0], *(part.astype(mx.float32) for part in parts[1:]), group_size=32, bits=bits)
            assert np.array_equal(tensor.numpy("f32"), as_numpy(wide))
            own = as_numpy(mx.dequantize(*parts, group_size=32, bits=bits))
            ulp = 2.0**-7 * (np.abs(own).max() + np.abs(tensor.parts["zeros"].array().astype(np.float32)).max())
            assert np.abs(tensor.numpy("f32") - own).max() <= ulp
        assert packed == 44
    own, tokenizer = load_model(path)
    assert np.array_equal(as_numpy(own(IDS)), as_numpy(model(IDS)))
    assert tokenizer.encode("hello") == mlx_lm.utils.load_tokenizer(path).encode("hello")
    ingot.convert(path, tmp_path / "again", format="mlx")
    again, _ = mlx_lm.utils.load_model(tmp_path / "again")
    assert np.array_equal(as_numpy(again(IDS)), as_numpy(model(IDS)))


@pytest.mark.models
def test_a_folder_of_several_ways_loads(tmp_path: Path) -> None:
    """mlx_lm's mixed recipe names layers in config.json; each is read by its own way."""
    path = tmp_path / "mixed"
    mlx_lm.convert(str(BASE), str(path), quantize=True, q_group_size=32, quant_predicate="mixed_3_6")
    with ingot.open(path) as checkpoint:
        widths = {tensor.params["bits"] for tensor in checkpoint.values() if tensor.codec == "affine"}
    assert widths == {3, 6}
    shutil.rmtree(path)


@pytest.mark.models
@pytest.mark.parametrize("same", [True, False])
def test_a_head_beside_tied_embeddings_loads(tmp_path: Path, same: bool) -> None:
    """mlx_lm refuses scales of a head that its config ties: the head goes, or the config says that it is not tied."""
    folder = tmp_path / "tied"
    folder.mkdir()
    with ingot.open(BASE) as checkpoint:
        weights = {name: tensor.numpy().copy() for name, tensor in checkpoint.items()}
        for path in checkpoint.companions.values():
            shutil.copy(path, folder)
    embedding = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = embedding if same else embedding[::-1].copy()
    ingot.save(folder / "model.safetensors", weights)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    ingot.convert(folder, tmp_path / "mlx", "mlx-4bit", format="mlx")
    model, _ = mlx_lm.load(str(tmp_path / "mlx"))
    assert ("lm_head" in model) is not same


def test_the_families_are_those_of_mlx_lm() -> None:
    """Modules with a ``Model``, their own or another's, are families; the others are parts that families share."""
    from mlx_lm import models, utils

    folder = Path(models.__path__[0])
    names = {item.name for item in pkgutil.iter_modules(models.__path__)}
    has_model = re.compile(r"^class Model\(|^from .* import .*\bModel\b", re.MULTILINE)
    families = {name for name in names if has_model.search((folder / f"{name}.py").read_text())}
    remapped = set(utils.MODEL_REMAPPING)
    assert families <= MODULES
    assert remapped <= REMAPPED
    if version("mlx-lm") == "0.32.2":  # the list's; earlier ones have fewer
        assert (families, remapped) == (MODULES, REMAPPED)
