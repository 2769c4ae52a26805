"""Folders for mlx_lm: three entries are one packed layer, as ``config.json`` says; hostile ones are refused by rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.codecs.affine.codec import AffineCodec
from ingot.conversion.run import prepare
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.errors import FormatError, IngotError, UnsupportedError
from ingot.formats.detect import detect_folder
from ingot.formats.packed_folders.mlx import MlxFormat
from ingot.model.spec import TensorSpec
from ingot.naming.config import MAX_CONFIG
from ingot.stores.memory import MemoryStore
from ingot.testing.codecs import encode_tensor
from ingot.testing.formats import FormatSuite, Item, dense

FORMAT = MlxFormat()


def packed(name: str, rows: int, cols: int, bits: int, group: int, dtype: str = "bf16") -> Item:
    options = {"bits": bits, "group": group, "zero_kind": "offset", "scales": dtype}
    values = np.random.default_rng(rows + cols).normal(0, 1, (rows, cols)).astype(np.float32)
    tensor = encode_tensor(AffineCodec(), values, options, dtype=dtype if dtype != "f32" else "f32")
    spec = tensor.spec()
    return Item(
        TensorSpec(name, spec.shape, spec.dtype, spec.codec, spec.parts, spec.params),
        {role: bytes(part.view()) for role, part in tensor.parts.items()},
    )


class TestMlx(FormatSuite):
    format = FORMAT

    def sample(self) -> list[Item]:
        return [*super().sample(), packed("q.weight", 3, 64, 4, 32)]

    @pytest.mark.parametrize("done", [0, 1, 3, 5])
    def test_a_resumed_run_gives_the_same_bytes(self, done: int) -> None:
        super().test_a_resumed_run_gives_the_same_bytes(done)


def test_every_width_and_group_comes_back() -> None:
    suite = TestMlx()
    items = [
        packed(f"l{bits}.{group}.{dtype}.weight", 3, 256, bits, group, dtype)
        for bits in (2, 3, 4, 5, 6, 8)
        for group in (32, 64, 128)
        for dtype in ("f16", "bf16", "f32")
    ]
    suite.check(items)
    config = json.loads(bytes(suite.write(items)[0].files["config.json"]))
    assert config["quantization"] == config["quantization_config"]
    assert config["quantization"]["l8.128.bf16"] == {"bits": 8, "group_size": 128, "mode": "affine"}


def folder(**changes: Any) -> dict[str, bytes]:
    """The files of one packed layer, ``config.json`` changed at ``quantization``."""
    target, _ = TestMlx().write([packed("q.weight", 2, 64, 4, 32), dense("norm", (4,), "f32")])
    files = {name: bytes(data) for name, data in target.files.items()}
    config = json.loads(files["config.json"])
    config["quantization"].update(changes)
    return {**files, "config.json": json.dumps(config).encode()}


def opened(files: dict[str, bytes]) -> Any:
    store = MemoryStore(files)
    format, entry = detect_folder(store.names(), store)
    assert format.name == "mlx"
    return format.read(store, entry)


def test_layers_are_told_by_config() -> None:
    tensor = opened(folder()).tensors["q.weight"]
    assert (tensor.shape, tensor.codec, tensor.params["bits"]) == ((2, 64), "affine", 4)
    assert sorted(opened(folder()).tensors) == ["norm", "q.weight"]
    with pytest.raises(IngotError) as found:
        opened(folder(q=False))
    assert found.value.rule == "mlx.parts"
    assert opened(folder(bits=8, q={"bits": 4, "group_size": 32})).tensors["q.weight"].shape == (2, 64)


def test_without_quantization_it_is_a_folder_of_safetensors() -> None:
    store = MemoryStore({**folder(), "config.json": b'{"model_type": "llama"}'})
    assert detect_folder(store.names(), store)[0].name == "safetensors"
    assert detect_folder(store.names())[0].name == "safetensors"


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"bits": 7}, "mlx.config"),
        ({"bits": True}, "mlx.config"),
        ({"bits": "4"}, "mlx.config"),
        ({"group_size": 0}, "mlx.config"),
        ({"group_size": 48}, "mlx.config"),
        ({"q": {"bits": 1}}, "mlx.config"),
        ({"mode": "mxfp4"}, "mlx.dtype"),
        ({"mode": "mxfp4", "bits": 8}, "mlx.config"),
        ({"mode": "mxfp2"}, "mlx.mode"),
        ({"q": {"mode": "nvfp4"}}, "mlx.config"),
        ({"mode": 3}, "mlx.mode"),
        ({"bits": 8}, "mlx.shape"),
        ({"bits": 3}, "mlx.shape"),
        ({"group_size": 64}, "mlx.shape"),
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_is_refused(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises((FormatError, UnsupportedError)) as found:
        opened(folder(**changes))
    assert found.value.rule == rule


def test_configs_are_read_as_the_hub_writes_them(tmp_path: Path) -> None:
    """Infinity, NaN, a repeated key, -0, a byte order mark: valid for transformers, and no reason to refuse weights."""
    text = b'\xef\xbb\xbf{"a": Infinity, "b": [NaN, -Infinity, -0], "c": 1, "c": 2, "model_type": "llama"}'
    (tmp_path / "model").mkdir()
    ingot.save(tmp_path / "model" / "model.safetensors", {"w": np.ones(3, np.float32)})
    (tmp_path / "model" / "config.json").write_bytes(text)
    with ingot.open(tmp_path / "model") as checkpoint:
        assert (checkpoint.format, list(checkpoint)) == ("safetensors", ["w"])
    ingot.convert(tmp_path / "model", tmp_path / "out", recipe="bf16", format="mlx", keep_names=True)
    assert json.loads((tmp_path / "out" / "config.json").read_bytes().decode("utf-8-sig"))["c"] == 2
    files = folder()
    files["config.json"] = b'{"a": Infinity, ' + files["config.json"].lstrip()[1:]
    assert opened(files).tensors["q.weight"].codec == "affine"


def test_damaged_configs_are_refused() -> None:
    for content in (b"", b"{", b"[]", b'{"a": NaN', b"\xff", b" " * (MAX_CONFIG + 1)):
        with pytest.raises(FormatError) as found:
            opened({**folder(), "config.json": content})
        assert found.value.rule == "mlx.config"


@pytest.mark.parametrize(
    ("entries", "rule"),
    [
        ({"q.weight": ((2, 8), "u32"), "q.scales": ((2, 2), "f16")}, "mlx.parts"),
        ({"q.weight": ((2, 8), "u32"), "q.biases": ((2, 2), "f16")}, "mlx.parts"),
        ({"q.weight": ((2, 8), "u32"), "q.scales": ((2, 2), "f16"), "q.biases": ((2, 2), "bf16")}, "mlx.dtype"),
        ({"q.weight": ((2, 8), "u32"), "q.scales": ((2, 2), "u8"), "q.biases": ((2, 2), "u8")}, "mlx.dtype"),
        ({"q.weight": ((2, 8), "u32"), "q.scales": ((2, 3), "f16"), "q.biases": ((2, 3), "f16")}, "mlx.shape"),
        ({"q.weight": ((2, 8), "u32"), "q.scales": ((2, 2), "f16"), "q.biases": ((2, 1), "f16")}, "mlx.shape"),
        ({"q.weight": ((16,), "u32"), "q.scales": ((4,), "f16"), "q.biases": ((4,), "f16")}, "mlx.shape"),
        ({"q.weight": ((), "u32"), "q.scales": ((), "f16"), "q.biases": ((), "f16")}, "mlx.shape"),
    ],
    ids=str,
)
def test_parts_that_do_not_fit_are_refused(
    entries: dict[str, tuple[tuple[int, ...], str]], rule: str, tmp_path: Path
) -> None:
    arrays = {name: np.zeros(shape, numpy_dtype(dtype)) for name, (shape, dtype) in entries.items()}
    ingot.save(tmp_path / "model.safetensors", arrays)
    config = b'{"quantization": {"bits": 4, "group_size": 32}}'
    with pytest.raises(IngotError) as found:
        opened({"model.safetensors": (tmp_path / "model.safetensors").read_bytes(), "config.json": config})
    assert found.value.rule == rule


def test_a_table_of_integers_is_no_packed_layer() -> None:
    target, _ = TestMlx().write([dense("table", (2, 8), "u32"), dense("q.scale", (2,), "f16")])
    files = {**target.files, "config.json": b'{"quantization": {"bits": 4, "group_size": 32}}'}
    assert sorted(opened(files).tensors) == ["q.scale", "table"]


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 4, "group": 32},
        {"bits": 7, "group": 32, "zero_kind": "offset"},
        {"bits": 4, "group": 16, "zero_kind": "offset"},
        {"bits": 4, "group": 128, "zero_kind": "offset"},
        {"bits": 4, "group": 32, "zero_kind": "offset", "bit_order": "msb"},
        {"bits": 4, "group": 32, "symmetric": False},
        {"bits": 8, "group": "row", "zero_kind": "offset"},
    ],
    ids=str,
)
def test_what_mlx_has_not_is_refused(options: dict[str, Any]) -> None:
    spec = encode_tensor(AffineCodec(), np.ones((4, 64), np.float32), options, dtype="f32").spec()
    assert FORMAT.why_unsupported(TensorSpec("x.weight", spec.shape, spec.dtype, spec.codec, spec.parts, spec.params))


def test_names_and_ranks_that_are_no_layer_are_refused() -> None:
    spec = packed("q.weight", 2, 64, 4, 32).spec
    assert FORMAT.why_unsupported(spec) is None
    assert FORMAT.why_unsupported(TensorSpec("q.kernel", spec.shape, spec.dtype, spec.codec, spec.parts, spec.params))
    assert FORMAT.why_unsupported(TensorSpec("q.weight", (128,), spec.dtype, spec.codec, spec.parts, spec.params))


LAYER = "model.layers.0.mlp"


def test_config_is_merged_on_the_way_in_and_cleaned_on_the_way_out(tmp_path: Any) -> None:
    source = tmp_path / "source"
    source.mkdir()
    weights = {f"{LAYER}.down_proj.weight": np.ones((4, 64), np.float32), "model.norm.weight": np.ones(4, np.float32)}
    ingot.save(source / "model.safetensors", weights)
    (source / "config.json").write_text('{"model_type": "llama", "model_file": "llama.py", "x": 1}')
    with prepare(source, tmp_path / "mlx", "mlx-4bit", "mlx") as prepared:
        planned = prepared.plan.size
    assert ingot.convert(source, tmp_path / "mlx", "mlx-4bit", format="mlx").size == planned
    config = json.loads((tmp_path / "mlx" / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["quantization"] == {"group_size": 64, "bits": 4, "mode": "affine"}
    with ingot.open(tmp_path / "mlx") as checkpoint:
        assert checkpoint.format == "mlx"
        assert np.array_equal(checkpoint[f"{LAYER}.down_proj.weight"].numpy(), weights[f"{LAYER}.down_proj.weight"])
    ingot.convert(tmp_path / "mlx", tmp_path / "back", format="safetensors")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == {
        "model_type": "llama",
        "model_file": "llama.py",
        "x": 1,
    }
    with ingot.open(tmp_path / "back") as checkpoint:
        assert checkpoint.format == "safetensors"
    ingot.convert(tmp_path / "mlx", tmp_path / "model.zt")  # the same integers
    with ingot.open(tmp_path / "model.zt") as checkpoint:
        assert checkpoint[f"{LAYER}.down_proj.weight"].params["zero_kind"] == "offset"


def test_a_config_that_is_no_object_is_refused(tmp_path: Any) -> None:
    source = tmp_path / "source"
    source.mkdir()
    ingot.save(source / "model.safetensors", {"a.mlp.up_proj.weight": np.ones((4, 64), np.float32)})
    (source / "config.json").write_text("[]")
    with pytest.raises(IngotError) as found:
        ingot.convert(source, tmp_path / "mlx", "mlx-4bit", format="mlx")
    assert found.value.rule in ("companions.config", "mlx.config")


def test_shards_have_an_index(tmp_path: Any) -> None:
    source = tmp_path / "source"
    source.mkdir()
    values = {f"layers.{n}.mlp.up_proj.weight": np.full((8, 64), n, np.float32) for n in range(4)}
    ingot.save(source / "model.safetensors", values)
    ingot.convert(source, tmp_path / "mlx", "mlx-3bit", format="mlx", max_shard=400, keep_names=True)
    names = sorted(path.name for path in (tmp_path / "mlx").iterdir())
    assert "model-00001-of-00004.safetensors" in names
    assert "model.safetensors.index.json" in names
    with ingot.open(tmp_path / "mlx") as checkpoint:
        assert checkpoint.format == "mlx"
        assert all(np.array_equal(checkpoint[name].numpy(), value) for name, value in values.items())


@pytest.mark.parametrize("recipe", ["int4", "int3"])
def test_integers_of_another_container_are_taken_as_they_are(tmp_path: Any, recipe: str) -> None:
    """Signed codes become unsigned ones with offsets; no value goes through floats."""
    rng = np.random.default_rng(1)
    values = {"layers.0.mlp.up_proj.weight": rng.normal(0, 1, (64, 128)).astype(np.float32)}
    source = tmp_path / "source"
    source.mkdir()
    ingot.save(source / "model.safetensors", values)
    ingot.convert(source, tmp_path / "zt", recipe)
    ingot.convert(tmp_path / "zt", tmp_path / "mlx", format="mlx", keep_names=True)
    with ingot.open(tmp_path / "zt") as before, ingot.open(tmp_path / "mlx") as after:
        tensor = after["layers.0.mlp.up_proj.weight"]
        assert (tensor.codec, tensor.params["zero_kind"]) == ("affine", "offset")
        assert tensor.numpy("f32").tobytes() == before["layers.0.mlp.up_proj.weight"].numpy("f32").tobytes()


@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [
        ("a.weight", "u32", "codes of a packed layer"),
        ("a.weight", "i8", "codes of a packed layer"),
        ("a.scales", "f16", "part"),
    ],
)
def test_dense_matrices_that_mlx_takes_for_codes_are_refused(
    name: str, dtype: str, reason: str, tmp_path: Path
) -> None:
    """The folder's own reader refuses them beside a packed layer."""
    packed = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
    ingot.save(tmp_path / "m.zt", {"b.weight": packed, name: np.zeros((2, 3), numpy_dtype(dtype))})
    with pytest.raises(UnsupportedError, match=reason) as caught:
        ingot.convert(tmp_path / "m.zt", tmp_path / "mlx", "mlx-4bit", format="mlx", keep_names=True)
    assert caught.value.rule == "convert.unsupported"
