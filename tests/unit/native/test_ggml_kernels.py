"""ggml's blocks: every instruction set gives the bits of the reference, and wrong sizes are refused."""

from __future__ import annotations

import numpy as np
import pytest

from ingot.codecs.blocks.apart import INCOMPATIBLE_SCALES
from ingot.codecs.blocks.grids import OF_TYPE, grid
from ingot.codecs.scaled_codebook.tables import numbers
from ingot.core.numeric.dtypes import cast, written
from ingot.core.runtime import native
from ingot.model.layouts.alternatives import AFFINE, CODEBOOKS, UNPACKED
from ingot.model.layouts.ggml import TYPES
from ingot.model.layouts.scaled_codebook import ScaledCodebookLayout
from tests.support.reference.ggml import DECODERS

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
    expected = expected.reshape(-1)
    for dtype in ("f32", "f16", "bf16"):
        with np.errstate(all="ignore"):
            wanted = cast(expected, dtype)
        bits = np.uint32 if dtype == "f32" else np.uint16
        held = np.isfinite(expected) | (type == "mxfp4")  # whose scale is never infinite
        past = bool((held & ~np.isfinite(cast(wanted, "f32"))).any())
        for away in (0, 1, 3, 5):  # elements from an aligned start
            room = np.zeros(wanted.size + 10, wanted.dtype)
            out = room[away : away + wanted.size]
            assert decode(type, blocks.reshape(-1), grid_of(type), written(out), dtype) == past
            both = np.isnan(cast(out, "f32")) & np.isnan(expected)
            assert (both | (out.view(bits) == wanted.view(bits))).all()
            assert not room[:away].view(bits).any()
            assert not room[away + wanted.size :].view(bits).any()
        assert not decode(type, blocks[:0].reshape(-1), grid_of(type), written(out[:0]), dtype)


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
    entries = np.zeros(grid, np.int8) if grid else None
    with pytest.raises(ValueError, match="expected"):
        decode(type, np.zeros(nbytes, np.uint8), entries, np.empty(size, np.float32), "f32")


@pytest.mark.parametrize("type", UNPACKED)
def test_codes_are_taken_out_and_put_back(type: str) -> None:
    """What is taken apart stands for the reference's values; it is put together to the same bytes."""
    own, block = UNPACKED[type], TYPES[type]
    blocks = np.random.default_rng(7).integers(0, 256, (501, block.nbytes), dtype=np.uint8)
    blocks[0], blocks[1] = 0, 255
    with np.errstate(all="ignore"):
        expected = DECODERS[type](blocks).reshape(501, block.elements)
        codes, scales, *minima = sizes_of(type, 501)
        native.kernels.ggml_unpack(type, blocks.reshape(-1), codes, scales, minima[0] if minima else None)
        bits = np.unpackbits(codes.reshape(501, -1), axis=1, bitorder="little").reshape(501, block.elements, own.bits)
        whole = (bits << np.arange(own.bits)).sum(axis=2)
        if isinstance(own, ScaledCodebookLayout):
            values = numbers(own.values or "")[whole]
            times = numbers(own.scales)[scales] if own.scales not in ("f16", "f32") else typed(scales, own.scales)
        else:
            values = (whole ^ 128) - 128.0 if own.signed else whole - float(own.zero_point or 0)
            times = typed(scales, own.scales)
        groups = times.reshape(501, -1, 1) * values.reshape(501, times.size // 501, -1).astype(np.float32)
        found = (groups + typed(minima[0], own.scales).reshape(501, -1, 1)) if minima else groups
    sound = np.isfinite(expected).all(axis=1)
    if type in INCOMPATIBLE_SCALES:
        sound &= ~np.isin(scales.reshape(501, -1), INCOMPATIBLE_SCALES[type]).any(axis=1)
    assert sound.sum() > 20
    assert np.array_equal(found.reshape(501, -1)[sound], expected[sound])
    if type not in AFFINE and type not in CODEBOOKS:
        return
    again = np.empty(blocks.size, np.uint8)
    native.kernels.ggml_pack(type, codes, scales, minima[0] if minima else None, again)
    assert again.tobytes() == blocks.tobytes()


def sizes_of(type: str, count: int) -> list[np.ndarray]:
    """Return room for the codes, scales and minima of so many blocks."""
    parts = UNPACKED[type].part_specs((count, TYPES[type].elements))
    return [np.empty(part.length or 0, np.uint8) for part in parts]


def typed(raw: np.ndarray, dtype: str) -> np.ndarray:
    return raw.view(np.float16 if dtype == "f16" else np.float32).astype(np.float32)


@pytest.mark.parametrize(
    ("type", "sizes", "minima"),
    [
        ("iq3_s", (110, 128, 2), None),
        ("q4_k", (144, 128, 32), None),
        ("q4_0", (18, 16, 4), None),
        ("q4_0", (18, 15, 2), None),
        ("q4_0", (18, 16, 2), 2),
        ("q4_1", (20, 16, 2), None),
        ("q4_1", (20, 16, 2), 4),
        ("nvfp4", (36, 32, 1), None),
    ],
)
def test_wrong_sizes_of_codes(type: str, sizes: tuple[int, int, int], minima: int | None) -> None:
    blocks, codes, scales = (np.zeros(size, np.uint8) for size in sizes)
    low = None if minima is None else np.zeros(minima, np.uint8)
    with pytest.raises(ValueError, match="expected"):
        native.kernels.ggml_unpack(type, blocks, codes, scales, low)
    with pytest.raises(ValueError, match="expected"):
        native.kernels.ggml_pack(type, codes, scales, low, blocks)


def test_products_of_scales_are_not_put_together() -> None:
    codes, scales, minima = sizes_of("q4_k", 1)
    native.kernels.ggml_unpack("q4_k", np.zeros(144, np.uint8), codes, scales, minima)
    with pytest.raises(ValueError, match="expected"):
        native.kernels.ggml_pack("q4_k", codes, scales, minima, np.zeros(144, np.uint8))
