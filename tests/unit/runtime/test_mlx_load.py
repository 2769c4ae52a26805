"""ingot.mlx.load_model against mlx_lm.load: the same model from every container; and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.codecs.affine.codec import AffineCodec
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.errors import IngotError
from ingot.model.part import memory_part
from ingot.model.tensor import Tensor
from ingot.runtime.loading.mlx_load import packed_layout
from ingot.testing.codecs import bits
from tests.support.models import make

mx = pytest.importorskip("mlx.core")
utils = pytest.importorskip("mlx_lm.utils")

from ingot.mlx import load_file, load_model, save_file  # noqa: E402
from tests.support.paths import DEMO_DATA as DEMO  # noqa: E402

IDS = mx.array([[1, 2, 3, 50, 77, 40, 9]])


def logits(model: Any) -> np.ndarray[Any, Any]:
    return np.array(model(IDS).astype(mx.float32))


def quantized(model: Any) -> int:
    return sum(type(module).__name__.startswith("Quantized") for _, module in model.named_modules())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as an MLX folder."""
    path = tmp_path_factory.mktemp("mlx") / "model"
    ingot.convert(DEMO, path, "mlx-4bit", format="mlx")
    return path


def test_a_folder_of_mlx_is_what_mlx_lm_loads(folder: Path) -> None:
    model, tokenizer = load_model(folder)
    wanted, _ = utils.load_model(folder)
    assert np.array_equal(logits(model), logits(wanted))
    assert quantized(model) == quantized(wanted) > 0
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"


def test_packed_layers_of_another_container_stay_packed(folder: Path, tmp_path: Path) -> None:
    ingot.convert(folder, tmp_path / "zt")
    model, _ = load_model(tmp_path / "zt")
    wanted, _ = utils.load_model(folder)
    assert quantized(model) == quantized(wanted)
    assert np.array_equal(logits(model), logits(wanted))


@pytest.mark.parametrize("format", ["safetensors", "zt"])
def test_dense_weights_are_those_of_mlx_lm(tmp_path: Path, format: str) -> None:
    ingot.convert(DEMO, tmp_path / "model", format=format)
    model, _ = load_model(tmp_path / "model")
    assert np.array_equal(logits(model), logits(utils.load_model(DEMO)[0]))


@pytest.mark.parametrize("recipe", ["int4", "int3", "int8"])
def test_quantized_weights_are_those_that_ingot_decodes(tmp_path: Path, recipe: str) -> None:
    """Packed where MLX computes with the same integers, else decoded: near the decoded model either way."""
    ingot.convert(DEMO, tmp_path / "model", recipe)
    model, _ = load_model(tmp_path / "model")
    assert (quantized(model) > 0) == (recipe != "int8")
    plain, _ = utils.load_model(DEMO)
    with ingot.open(tmp_path / "model") as checkpoint:
        plain.load_weights([(name, tensor.to("mlx")) for name, tensor in checkpoint.items()])
    found, wanted = logits(model), logits(plain)
    assert np.abs(found - wanted).max() <= 0.06 * np.abs(wanted).max()


@pytest.mark.parametrize(("zero", "exact"), [(8, True), (7, True), (2.0**-24, False)])
def test_layers_stay_packed_where_the_offset_is_exact(zero: float, exact: bool) -> None:
    """MLX adds -scale * zero: f16 holds it for a power of two, f32 for integers; q - zero is longer at 2^-24."""
    params = {"codec_version": 1, "bits": 4, "granularity": "group", "group_size": 64, "axis": -1, "dtype": "f32"}
    params |= {"packing": "rows_lsb", "signed": False, "zeros": True}
    parts = {
        "packed_weight": memory_part(np.zeros(8 * 32, np.uint8), "u8"),
        "scales": memory_part(np.full((8, 1), 0.1, np.float16), "f16"),
        "zeros": memory_part(np.full((8, 1), zero, np.float16), "f16"),
    }
    tensor = Tensor("x.weight", (8, 64), "f32", "affine", parts, params, AffineCodec())
    assert (packed_layout(tensor) is not None) == exact


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    ingot.convert(DEMO, tmp_path / "model")
    shutil.copy(DEMO / "config.json", tmp_path / "config.json")
    with ingot.open(tmp_path / "model") as checkpoint:
        some = dict(list(checkpoint.items())[1:])
        ingot.save(tmp_path / "less.zt", some)
    with pytest.raises(IngotError) as found:
        load_model(tmp_path / "less.zt")
    assert found.value.rule == "mlx.weights"


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        (None, "model.config-missing"),
        ("[", "model.config"),
        ("{}", "model.architecture"),
        ('{"model_type": "../x"}', "model.architecture"),
        ('{"model_type": "no_such_model"}', "model.architecture"),
        ('{"model_type": "llama"}', "mlx.weights"),
    ],
)
def test_a_wrong_config_is_refused(tmp_path: Path, config: str | None, rule: str) -> None:
    ingot.save(tmp_path / "model.zt", {"x": np.ones(3, np.float32)})
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(IngotError) as found:
        load_model(tmp_path)
    assert found.value.rule == rule


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """Of a Qwen2 transformers would make an empty one."""
    qwen2 = make("tied qwen2", tmp_path / "qwen2")
    with pytest.raises(IngotError) as found:
        load_model(qwen2)
    assert found.value.rule == "model.tokenizer"


def test_files_come_back(tmp_path: Path) -> None:
    arrays = {
        "a": mx.array([1.5, -2.0]).astype(mx.bfloat16),
        "b": mx.arange(6).reshape(2, 3),
        "c": mx.array(2.0, dtype=mx.float16),
    }
    for name in ("x.zt", "x.safetensors"):
        save_file(arrays, tmp_path / name)
        found = load_file(tmp_path / name)
        assert {key: (value.dtype, value.shape) for key, value in found.items()} == {
            key: (value.dtype, value.shape) for key, value in arrays.items()
        }
        assert all(bool(mx.all(found[key] == value)) for key, value in arrays.items())
    with ingot.open(tmp_path / "x.zt") as checkpoint:
        assert bits(checkpoint["a"].numpy()) == bits(np.array([1.5, -2], numpy_dtype("bf16")))
