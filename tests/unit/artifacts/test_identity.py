"""Content ids: the same for the same tensors wherever they lie, another for anything else."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from blake3 import blake3

import ingot
from ingot.artifacts.identity import content_id, tensor_digest


def id_of(path: Path, workers: int | None = None) -> str:
    with ingot.open(path) as checkpoint:
        return content_id(checkpoint, workers=workers)


ARRAYS = {
    "b": np.arange(12, dtype=np.float32).reshape(3, 4),
    "a": np.array(7, np.int64),
    "é": np.zeros((0, 5), ml_dtypes.bfloat16),
    "c.x": np.array([True, False]),
}


def test_the_definition(tmp_path):
    lines = []
    for name, dtype, shape in (("a", "i64", ""), ("b", "f32", "3,4"), ("c.x", "bool", "2"), ("é", "bf16", "0,5")):
        lines.append(f"{name}\0{dtype}\0{shape}\0{blake3(ARRAYS[name].tobytes()).hexdigest()}\n")
    expected = "blake3:" + blake3("".join(lines).encode()).hexdigest()
    ingot.save(tmp_path / "x.safetensors", ARRAYS)
    assert id_of(tmp_path / "x.safetensors") == expected
    assert id_of(tmp_path / "x.safetensors", workers=1) == expected


def test_containers_shards_and_lossless_codecs_do_not_matter(model, tmp_path):
    expected = id_of(model)
    ingot.convert(model, tmp_path / "sharded", max_shard="100KB", format="safetensors")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    ingot.convert(model, tmp_path / "x.zt", recipe="lossless")
    ingot.convert(model, tmp_path / "x.squizd")
    ingot.convert(tmp_path / "x.zt", tmp_path / "back.safetensors", recipe="bf16")
    for path in ("sharded", "x.zt", "x.squizd", "back.safetensors"):
        assert id_of(tmp_path / path) == expected, path


@pytest.mark.parametrize(
    "changed",
    [
        {"b": ARRAYS["b"].astype(np.float64)},
        {"b": ARRAYS["b"].reshape(4, 3)},
        {"b": ARRAYS["b"] * np.array([1, 1, 1, -1], np.float32)},
        {"a": np.array([7], np.int64)},
        {"d": np.zeros(1, np.uint8)},
    ],
)
def test_anything_else_is_another(tmp_path, changed):
    ingot.save(tmp_path / "x.zt", ARRAYS)
    ingot.save(tmp_path / "y.zt", {**ARRAYS, **changed})
    assert id_of(tmp_path / "x.zt") != id_of(tmp_path / "y.zt")


def test_signs_of_zero_and_payloads_of_nan_count(tmp_path):
    found = set()
    for word in (0, 0x80000000, 0x7FC00000, 0x7FC00001):
        ingot.save(tmp_path / "x.zt", {"x": np.array([word], np.uint32).view(np.float32)})
        found.add(id_of(tmp_path / "x.zt"))
    assert len(found) == 4


def test_quantized_tensors_count_by_their_values(model, tmp_path):
    ingot.convert(model, tmp_path / "q.zt", recipe="int4")
    with ingot.open(tmp_path / "q.zt") as checkpoint:
        ingot.save(tmp_path / "dense.zt", {name: tensor.numpy() for name, tensor in checkpoint.items()})
        assert content_id(checkpoint) == id_of(tmp_path / "dense.zt")


def test_a_large_tensor_passes_in_pieces(tmp_path):
    data = np.random.default_rng(0).integers(0, 256, 5_000_003, np.uint8)
    ingot.save(tmp_path / "x.zt", {"x": data})
    with ingot.open(tmp_path / "x.zt", io="pread") as checkpoint:
        assert tensor_digest(checkpoint["x"]) == blake3(data.tobytes()).hexdigest()


def test_damage_is_seen(tmp_path):
    ingot.save(tmp_path / "x.zt", {"x": np.arange(1000, dtype=np.float32)})
    data = bytearray((tmp_path / "x.zt").read_bytes())
    data[100] ^= 1
    (tmp_path / "x.zt").write_bytes(data)
    with pytest.raises(ingot.IngotError) as caught:
        id_of(tmp_path / "x.zt")
    assert caught.value.rule == "part.digest-mismatch"
