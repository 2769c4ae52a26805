"""ggml's blocks: every instruction set gives the bits of the reference, and wrong sizes are refused."""

from __future__ import annotations

import numpy as np
import pytest

from ingot.codecs.blocks.grids import OF_TYPE, grid
from ingot.core import native
from ingot.model.layouts.families import AFFINE
from ingot.model.layouts.ggml import TYPES
from ingot.testing.reference.affine import pack
from ingot.testing.reference.ggml import DECODERS

decode = native.kernels.ggml_decode


def grid_of(type: str) -> np.ndarray | None:
    return grid(OF_TYPE[type]).reshape(-1) if type in OF_TYPE else None


def test_every_type_has_a_reference() -> None:
    assert set(DECODERS) == set(TYPES)


@pytest.mark.parametrize("type", TYPES)
def test_any_bytes_are_decoded_as_the_reference_does(type: str) -> None:
    block = TYPES[type]
    blocks = np.random.default_rng(7).integers(0, 256, (501, block.nbytes), dtype=np.uint8)
    blocks[0], blocks[1] = 0, 255
    with np.errstate(all="ignore"):
        expected = DECODERS[type](blocks)
    out = np.empty(501 * block.elements, np.float32)
    decode(type, blocks.reshape(-1), grid_of(type), out)
    both = np.isnan(out) & np.isnan(expected.reshape(-1))
    assert (both | (out.view(np.uint32) == expected.reshape(-1).view(np.uint32))).all()
    decode(type, blocks[:0].reshape(-1), grid_of(type), out[:0])


@pytest.mark.parametrize(
    ("type", "nbytes", "grid", "size"),
    [
        ("q4_0", 17, 0, 32),
        ("q4_0", 18, 0, 64),
        ("q4_0", 18, 0, 31),
        ("q4_0", 18, 8, 32),
        ("q9", 18, 0, 32),
        ("iq3_s", 110, 0, 256),
        ("iq3_s", 110, 2047, 256),
    ],
)
def test_wrong_sizes(type: str, nbytes: int, grid: int, size: int) -> None:
    entries = np.zeros(grid, np.float32) if grid else None
    with pytest.raises(ValueError, match="expected"):
        decode(type, np.zeros(nbytes, np.uint8), entries, np.empty(size, np.float32))


@pytest.mark.parametrize("type", AFFINE)
def test_integers_are_taken_out_and_put_back(type: str) -> None:
    """Codes are those of the decoder, rows of them the lowest bits first."""
    own, block = AFFINE[type], TYPES[type]
    blocks = np.random.default_rng(7).integers(0, 256, (501, block.nbytes), dtype=np.uint8)
    ones = blocks.copy()
    ones[:, :2] = np.array([1], "<f2").view(np.uint8)
    if own.zeros:
        ones[:, 2:4] = 0
    codes = np.empty(501 * 4 * own.bits, np.uint8)
    scales, minima = np.empty(501, np.uint16), np.empty(501, np.uint16) if own.zeros else None
    native.kernels.ggml_unpack(type, blocks.reshape(-1), codes, scales, minima)
    again = np.empty(blocks.size, np.uint8)
    native.kernels.ggml_pack(type, codes, scales, minima, again)
    assert again.tobytes() == blocks.tobytes()
    assert scales.tobytes() == blocks[:, :2].tobytes()
    assert minima is None or minima.tobytes() == blocks[:, 2:4].tobytes()
    wanted = DECODERS[type](ones).astype(np.int64) + (own.zero_point or 0)
    assert codes.tobytes() == pack((wanted & ((1 << own.bits) - 1)).astype(np.uint8), own.bits, msb=False).tobytes()


@pytest.mark.parametrize(
    ("type", "sizes", "minima"),
    [
        ("q4_k", (144, 128, 1), None),
        ("q4_0", (18, 16, 2), None),
        ("q4_0", (18, 15, 1), None),
        ("q4_0", (18, 16, 1), 1),
        ("q4_1", (20, 16, 1), None),
        ("q4_1", (20, 16, 1), 2),
    ],
)
def test_wrong_sizes_of_integers(type: str, sizes: tuple[int, int, int], minima: int | None) -> None:
    blocks, codes = (np.zeros(size, np.uint8) for size in sizes[:2])
    scales, low = np.zeros(sizes[2], np.uint16), None if minima is None else np.zeros(minima, np.uint16)
    with pytest.raises(ValueError, match="expected"):
        native.kernels.ggml_unpack(type, blocks, codes, scales, low)
    with pytest.raises(ValueError, match="expected"):
        native.kernels.ggml_pack(type, codes, scales, low, blocks)
