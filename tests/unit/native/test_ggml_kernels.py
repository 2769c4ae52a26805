"""ggml's blocks: every instruction set gives the bits of the reference, and wrong sizes are refused."""

from __future__ import annotations

import numpy as np
import pytest

from ingot.codecs.blocks.grids import OF_TYPE, grid
from ingot.core import native
from ingot.model.layouts.ggml import TYPES
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
