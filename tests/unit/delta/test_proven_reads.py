"""What covers a whole file, or what a delta makes, is compared by everything that reads or makes it whole."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.artifacts.identity import content_id
from ingot.core.parsing import cbor, manifest_digest
from ingot.errors import IntegrityError

SHAPES = {"a": (40, 16), "b": (8, 8)}


def weights(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 1, shape).astype(np.float32) for name, shape in SHAPES.items()}


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    for name, seed in (("base", 0), ("tuned", 1)):
        ingot.save(tmp_path / f"{name}.safetensors", weights(seed))
    return tmp_path / "base.safetensors", tmp_path / "tuned.safetensors"


@pytest.fixture
def damaged(pair: tuple[Path, Path], tmp_path: Path) -> Path:
    """A ``.wdelta`` with one byte of a value changed."""
    path = tmp_path / "d.wdelta"
    ingot.diff(*pair, path, strategy="int4")
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    return path


READS: dict[str, Callable[[Path], object]] = {
    "load_file": ingot.numpy.load_file,
    "load_file of mlx": lambda path: pytest.importorskip("ingot.mlx").load_file(path),
    "state_dict": lambda path: ingot.open(path).state_dict(),
    "state_dict of every name": lambda path: ingot.open(path).state_dict(names=["b", "a"]),
    "layers": lambda path: list(ingot.open(path).layers()),
    "compare": lambda path: ingot.compare(path, path),
    "content id": lambda path: content_id(ingot.open(path)),
    "apply_delta": lambda path: ingot.apply_delta(weights(0), ingot.open(path)),
}


@pytest.mark.parametrize("read", READS)
def test_a_changed_byte_of_a_wdelta_is_no_weight(damaged: Path, read: str) -> None:
    with pytest.raises(ValueError, match="SHA-256") as caught:
        READS[read](damaged)
    assert isinstance(caught.value, IntegrityError)
    assert caught.value.rule == "wdelta.digest-mismatch"


def test_digests_that_are_not_to_be_checked_are_not(damaged: Path) -> None:
    with ingot.open(damaged, verify=False) as checkpoint:
        assert list(checkpoint.state_dict()) == ["a", "b"]


def with_another_result(path: Path) -> None:
    """Let a delta promise another result, and its manifest be whole."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[-16:-8])
    root = cbor.loads(data[-16 - size : -16])
    root["attributes"]["delta"]["result"]["content"] = "blake3:" + "0" * 64
    root[manifest_digest.KEY] = manifest_digest.stand_in("crc32c")
    made = manifest_digest.fill_cbor(cbor.dumps(root), "crc32c")
    path.write_bytes(data[: -16 - size] + made + struct.pack("<Q", len(made)) + data[-8:])


def test_a_result_that_is_not_the_promised_one_is_refused_unasked(pair: tuple[Path, Path], tmp_path: Path) -> None:
    delta, out = tmp_path / "d.zt", tmp_path / "out.safetensors"
    ingot.diff(*pair, delta, strategy="exact")
    assert ingot.patch(pair[0], delta, out).verified
    out.unlink()
    with_another_result(delta)
    with pytest.raises(IntegrityError) as caught:
        ingot.patch(pair[0], delta, out)
    assert caught.value.rule == "delta.result"
    assert not out.exists()
    assert not ingot.patch(pair[0], delta, out, verify=False).verified


@pytest.mark.parametrize("strategy", ["exact", "int8"])
def test_in_memory_too_and_nothing_is_left_changed(pair: tuple[Path, Path], tmp_path: Path, strategy: str) -> None:
    delta, state = tmp_path / "d.zt", weights(0)
    ingot.diff(*pair, delta, strategy=strategy)
    ingot.apply_delta(state, delta).revert()
    with_another_result(delta)
    with pytest.raises(IntegrityError) as caught:
        ingot.apply_delta(state, delta)
    assert caught.value.rule == "delta.result"
    assert all(np.array_equal(state[name], value) for name, value in weights(0).items())
    ingot.apply_delta(state, delta, verify=False).revert()
    with pytest.raises(IntegrityError):
        ingot.apply_delta(state, delta, verify_base=False, verify=True, undo=False)
