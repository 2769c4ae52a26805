"""Three bits with their correction, and NF4, in files made by hand from the layout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.errors import IngotError

Arrays = dict[str, np.ndarray]


def directory(folder: Path, arrays: Arrays) -> Path:
    (folder / "tensors").mkdir(parents=True)
    for suffix, array in arrays.items():
        np.save(folder / "tensors" / f"w__{suffix}.npy", array)
    (folder / "manifest.json").write_text(json.dumps({"w": "w"}))
    (folder / "tensors" / ".manifest_ready").touch()
    return folder


def milo(shape: tuple[int, ...], group: int, rank: int = 3) -> tuple[Arrays, np.ndarray]:
    """Codes 0 to 7, eight in three bytes; scales and zero points for runs of ``group`` elements; two factors."""
    rng = np.random.default_rng(len(shape) + group)
    size, cols = int(np.prod(shape)), shape[-1]
    rank = min(rank, size // cols)
    runs = -(-size // group)
    codes, scales, zeros = rng.integers(0, 8, size), rng.random(runs) + 0.1, np.full(runs, 3.0)
    padded = np.append(codes, np.zeros(-size % 8, int)).reshape(-1, 8)
    words = (padded << 3 * np.arange(8)).sum(1)
    packed = np.stack([words & 255, words >> 8 & 255, words >> 16], -1).astype(np.uint8).reshape(-1)
    left, right = rng.normal(0, 1, (size // cols, rank)), rng.normal(0, 1, (rank, cols))
    arrays = {"q3": packed, "s3": scales, "z3": zeros, "lra": left, "lrb": right}
    arrays = {name: array if name == "q3" else array.astype(np.float32) for name, array in arrays.items()}
    wide = np.repeat(arrays["s3"], group)[:size] * (codes - np.repeat(arrays["z3"], group)[:size])
    wanted = wide.reshape(-1, cols) + arrays["lra"].astype(float) @ arrays["lrb"]
    return {**arrays, "shape": np.array(shape)}, wanted.reshape(shape)


@pytest.mark.parametrize(
    ("shape", "group"),
    [((8, 64), 64), ((5, 36), 64), ((3, 5), 64), ((4, 3, 8), 32), ((7, 9), 16), ((2, 100), 128)],
)
def test_three_bits_with_their_correction(tmp_path: Path, shape: tuple[int, ...], group: int) -> None:
    arrays, wanted = milo(shape, group)
    with ingot.open(directory(tmp_path / "squish", arrays)) as checkpoint:
        assert checkpoint["w"].codec == "with_low_rank"
        assert np.allclose(checkpoint["w"].numpy(), wanted, rtol=0, atol=1e-5)
        assert np.allclose(checkpoint["w"].numpy("f16"), wanted, rtol=2**-10, atol=1e-2)
    del arrays["lra"], arrays["lrb"]
    with ingot.open(directory(tmp_path / "plain", arrays)) as checkpoint:
        assert checkpoint["w"].codec == "affine"
        plain = checkpoint["w"].numpy()
    rows = plain.reshape(-1, shape[-1])
    assert not np.allclose(rows, wanted.reshape(rows.shape), rtol=0, atol=1e-2)


def test_a_rank_past_the_matrix_is_refused(tmp_path: Path) -> None:
    arrays, _ = milo((2, 64), 64, 2)
    arrays |= {"lra": np.ones((2, 3), np.float32), "lrb": np.ones((3, 64), np.float32)}
    with pytest.raises(IngotError) as caught:
        ingot.open(directory(tmp_path / "squish", arrays))
    assert caught.value.rule == "npydir.array-shape"


@pytest.mark.parametrize("runs", [3, 5])
def test_runs_of_unknown_length_are_refused(tmp_path: Path, runs: int) -> None:
    arrays, _ = milo((10, 100), 64)  # 334 to 499 elements a run, and 200 to 249: no power of two
    arrays |= {"s3": np.ones(runs, np.float32), "z3": np.ones(runs, np.float32)}
    with pytest.raises(IngotError) as caught:
        ingot.open(directory(tmp_path / "squish", arrays))
    assert caught.value.rule == "npydir.array-shape"


@pytest.mark.parametrize(("shape", "groups"), [((4, 64), 2), ((6, 10), 1), ((2, 3, 16), 4)])
def test_nf4(tmp_path: Path, shape: tuple[int, ...], groups: int) -> None:
    rng = np.random.default_rng(0)
    rows, cols = int(np.prod(shape[:-1])), shape[-1]
    indices, scales = rng.integers(0, 16, (rows, cols)), rng.random((rows, groups)).astype(np.float32)
    packed = (indices[:, 0::2] | indices[:, 1::2] << 4).astype(np.uint8)
    with ingot.open(
        directory(tmp_path / "squish", {"nf4": packed, "s_nf4": scales, "shape": np.array(shape)})
    ) as checkpoint:
        tensor = checkpoint["w"]
        table = tensor.parts["codebook"].array()
        assert (table[0], table[7], table[15]) == (-1, 0, 1)
        assert (np.diff(table) > 0).all()
        wanted = table[indices] * np.repeat(scales, cols // groups, 1)
        assert np.array_equal(tensor.numpy(), wanted.reshape(shape))
        assert np.array_equal(tensor[1:], wanted.reshape(shape)[1:])
