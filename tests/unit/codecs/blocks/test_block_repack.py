"""ggml's blocks as affine integers or codebooks, and back: the same codes, scales and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ingot.codecs.affine.codec import AffineCodec
from ingot.codecs.base import Repacked
from ingot.codecs.blocks.apart import INCOMPATIBLE_SCALES, pack
from ingot.codecs.blocks.codec import BlocksCodec
from ingot.codecs.blocks.repack import to_blocks
from ingot.codecs.scaled_codebook.tables import numbers
from ingot.codecs.table import CODECS
from ingot.core.runtime import native
from ingot.model.bytesource import MemorySource
from ingot.model.layouts.affine import OFFSETS, POINTS
from ingot.model.layouts.alternatives import AFFINE, CODEBOOKS, UNPACKED, alternatives
from ingot.model.layouts.ggml import GgmlBlocksLayout
from ingot.model.layouts.scaled_codebook import ScaledCodebookLayout
from ingot.model.part import memory_part
from ingot.model.tensor import Tensor
from ingot.testing.codecs import encode_tensor, repacked, zstd_part

BLOCKS, AFFINE_CODEC = BlocksCodec(), AffineCodec()


HALVES = {"q4_1": (0, 2), "q5_1": (0, 2), "q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2)}
HALVES |= {"q6_k": (208,), "tq2_0": (64,), "mxfp4": (), "nvfp4": ()}
"""Where in a block numbers of f16 stand; elsewhere one at its beginning."""


def stored(kind: str, rows: int = 7, cols: int | None = None, seed: int = 3) -> Tensor:
    """Return blocks with any integers, and f16 numbers of both signs, zeros among them."""
    layout, rng = GgmlBlocksLayout(kind), np.random.default_rng(seed)
    cols = cols or 3 * layout.block.elements
    raw = rng.integers(0, 256, (rows * cols // layout.block.elements, layout.block.nbytes), np.uint8)
    for start in HALVES.get(kind, (0,)):
        numbers = (rng.standard_normal((len(raw), 1)) * 0.05).astype("<f2")
        numbers[0], numbers[1] = 0, -0.0
        raw[:, start : start + 2] = numbers.view(np.uint8)
    if kind in INCOMPATIBLE_SCALES:
        scales = raw[:, : 1 if kind == "mxfp4" else 4]
        scales[...] = np.setdiff1d(np.arange(254), INCOMPATIBLE_SCALES[kind])[scales % 120]
    parts = {"blocks": memory_part(raw, "u8")}
    return Tensor("w", (rows, cols), "f32", "ggml_blocks", parts, layout.attributes(), BLOCKS)


def ways(tensor: Tensor) -> list[Repacked]:
    codec: Any = tensor.decoder
    return [codec.repack(tensor, layout) for layout in alternatives(tensor.layout, tensor)]


def made(way: Repacked, tensor: Tensor, cuts: tuple[int, ...] = (2, 3)) -> Tensor:
    found = repacked(way, tensor, cuts)
    codec = CODECS[found.codec]
    found = replace(found, decoder=codec, dtype=str(found.params["dtype"]))
    codec.check(found)
    return found


def equal(one: Tensor, other: Tensor) -> bool:
    """Whether values are equal; a zero may have either sign."""
    return bool(np.array_equal(one.numpy("f32"), other.numpy("f32")))


@pytest.mark.parametrize("kind", UNPACKED)
def test_blocks_become_what_they_are_in_other_families_and_come_back(kind: str) -> None:
    """All their layouts give equal values; the one that they have taken apart gives the same bits (E2M1 has a -0)."""
    tensor = stored(kind)
    own, *others = ways(tensor)
    assert own.layout == UNPACKED[kind]
    assert own.exact
    apart = made(own, tensor)
    assert equal(apart, tensor)
    assert kind in INCOMPATIBLE_SCALES or apart.numpy("f32").tobytes() == tensor.numpy("f32").tobytes()
    back = CODECS[apart.codec].repack(apart, tensor.layout)
    assert back.exact == (kind in AFFINE or kind in CODEBOOKS)
    if back.exact:
        assert bytes(made(back, apart).parts["blocks"].view()) == bytes(tensor.parts["blocks"].view())
    assert any(way.exact for way in others)
    for way in (way for way in others if way.exact):
        other = made(way, tensor, (way.rows,) if way.step >= way.rows else (2, 3))
        assert equal(other, tensor)
        again = CODECS[other.codec].repack(other, tensor.layout)
        assert kind not in AFFINE or again.exact
        if again.exact:  # not from scales that are repeated, or have another type
            assert bytes(made(again, other).parts["blocks"].view()) == bytes(tensor.parts["blocks"].view())


@pytest.mark.parametrize("kind", INCOMPATIBLE_SCALES)
def test_bytes_of_scales_that_mean_something_else_in_blocks_are_told(kind: str) -> None:
    """Just those: every byte as the scale of every code, in blocks and as a codebook."""
    own, elements = CODEBOOKS[kind], GgmlBlocksLayout(kind).block.elements
    codes = np.tile(np.arange(16, dtype=np.uint8), (256, elements // 16)).reshape(256, -1)
    indices = codes[:, ::2] | codes[:, 1::2] << 4
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 1 if kind == "mxfp4" else 4, 1)
    plain = Tensor.from_parts(own, {"indices": indices, "scales": memory_part(scales, "u8", own.scales)}, codes.shape)
    blocks = pack(kind, {"indices": indices.reshape(-1), "scales": scales.reshape(-1)})
    layout = GgmlBlocksLayout(kind)
    packed = Tensor.from_parts(layout, {"blocks": blocks}, codes.shape)
    there = np.empty(codes.shape, np.float32)
    native.kernels.ggml_decode(kind, blocks, None, there.reshape(-1), "f32")
    with np.errstate(over="ignore"):
        here = products(own, scales[:, :1])
    differ = ~((there == here) | (np.isnan(there) & np.isnan(here))).all(axis=1)
    assert np.flatnonzero(differ).tolist() == sorted(INCOMPATIBLE_SCALES[kind].tolist())
    assert "scale 0x" in (CODECS["scaled_codebook"].repack(plain, layout).why_not or "")
    assert "scale 0x" in (BLOCKS.repack(packed, own).why_not or "")


def products(own: ScaledCodebookLayout, scales: np.ndarray) -> np.ndarray:
    """Return each byte's scale times every code, as often as a block has it."""
    every = numbers(own.scales)[scales] * numbers("f4_e2m1fn")[None, :]
    return np.tile(every, (1, 2 if own.scales == "f8_e8m0fnu" else 4))


class _Unread(MemorySource):
    def view(self, offset: int, length: int) -> memoryview:
        raise AssertionError("expected nothing to be read")


@pytest.mark.parametrize("kind", list(INCOMPATIBLE_SCALES))
def test_blocks_are_not_read_for_layouts_that_cannot_hold_them(kind: str) -> None:
    tensor = stored(kind)
    part = tensor.parts["blocks"]
    unread = replace(part, source=_Unread(bytes(part.view()), "unread"))
    way = BLOCKS.repack(replace(tensor, parts={"blocks": unread}), replace(CODEBOOKS[kind], values="nf4"))
    assert not way.exact


@pytest.mark.parametrize("kind", ["q4_0", "q5_0", "q8_0"])
def test_blocks_without_offsets_become_unsigned_codes_with_them(kind: str) -> None:
    """As MLX has them; a scale that is too large for an offset in f16 takes f32."""
    tensor = stored(kind)
    found = [way for way in ways(tensor) if getattr(way.layout, "zero", None) == OFFSETS]
    assert [(way.layout.scales, way.exact) for way in found] == [("f16", True), ("f32", True)]
    raw = np.frombuffer(tensor.parts["blocks"].view(), np.uint8).copy().reshape(21, -1)
    raw[20, :2] = np.array([60000], "<f2").view(np.uint8)
    large = replace(tensor, parts={"blocks": zstd_part(memory_part(raw, "u8"))})
    found = [way for way in ways(large) if getattr(way.layout, "zero", None) == OFFSETS]
    assert [(way.layout.scales, way.exact) for way in found] == [("f16", False), ("f32", True)]
    assert equal(made(found[1], large), large)


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({"bits": 4, "group": 32}, {"q4_0", "q4_1"}),
        ({"bits": 4, "group": 96}, {"q4_0", "q4_1"}),
        ({"bits": 4, "group": 64}, {"q4_0", "q4_1"}),  # the last group is shorter
        ({"bits": 4, "group": "row", "scales": "f16"}, {"q4_0", "q4_1"}),
        ({"bits": 4, "group": 32, "scales": "bf16"}, {"q4_0", "q4_1"}),
        ({"bits": 4, "group": 32, "signed": False, "zero_point": 8}, {"q4_0", "q4_1"}),
        ({"bits": 4, "group": 32, "signed": False, "zero_point": 7}, set()),  # 7 s is no f16
        ({"bits": 4, "group": 32, "scales": "f32"}, set()),
        ({"bits": 4, "group": 32, "zero_kind": "offset", "scales": "f16"}, {"q4_1"}),
        ({"bits": 4, "group": 32, "bit_order": "msb"}, {"q4_0", "q4_1"}),
        ({"bits": 5, "group": 32}, {"q5_0", "q5_1"}),
        ({"bits": 8, "group": 32, "scales": "f16"}, {"q8_0"}),
        ({"bits": 8, "group": 32, "scales": "f16", "signed": False, "zero_point": 128}, {"q8_0"}),
        ({"bits": 3, "group": 32}, None),
        ({"bits": 4, "group": 16}, None),
        ({"bits": 4, "group": 48}, None),
        ({"bits": 4, "group": "tensor"}, None),
    ],
)
def test_integers_become_blocks_where_these_have_them(options: dict[str, Any], kinds: set[str] | None) -> None:
    values = (np.random.default_rng(1).integers(-64, 64, (5, 96)) / 64).astype(np.float32)
    tensor = encode_tensor(AFFINE_CODEC, values, options, dtype="f32")
    found = [way for way in ways(tensor) if isinstance(way.layout, GgmlBlocksLayout)]
    assert bool(found) == (kinds is not None)
    exact = {way.layout.type for way in found if way.exact}
    if "q4_1" in (kinds or ()) and len(kinds or ()) == 2:
        exact.add("q4_1")  # whether a product of scale and zero point fits f16 is the numbers' affair
    assert exact == (kinds or set())
    assert all(way.why_not for way in found if not way.exact)
    for way in (way for way in found if way.exact):
        assert equal(made(way, tensor), tensor)


def test_one_zero_point_that_is_another_is_told() -> None:
    layout = replace(AFFINE["q4_0"], zero=POINTS)
    codes, scales = np.zeros((2, 32), np.uint8), np.ones(4, np.float16)
    zeros = np.array([8, 8, 8, 7], np.float16)
    tensor = Tensor.from_parts(layout, {"packed_weight": codes, "scales": scales, "zeros": zeros}, (2, 64))
    assert "zero point 8" in (to_blocks(tensor, layout, GgmlBlocksLayout("q4_0")).why_not or "")
    assert to_blocks(tensor, layout, GgmlBlocksLayout("q4_1")).exact


def test_other_types_stay_blocks() -> None:
    layout = GgmlBlocksLayout("iq3_s")
    parts = {"blocks": memory_part(np.zeros(110, np.uint8), "u8")}
    tensor = Tensor("w", (1, 256), "f32", "ggml_blocks", parts, layout.attributes(), BLOCKS)
    assert not list(alternatives(layout, tensor))
    assert not BLOCKS.repack(tensor, AFFINE["q4_0"]).exact


def test_rows_of_blocks_move_as_they_are() -> None:
    from ingot.model.checkpoint import Checkpoint
    from ingot.views.rows import permute

    tensor = stored("q4_0")
    view = permute(Checkpoint({"w": tensor}, format="x", location="x"), {"w": [6, 5, 4, 3, 2, 1, 0]})["w"]
    assert view.codec == "ggml_blocks"
    assert view.numpy().tobytes() == tensor.numpy()[::-1].tobytes()
