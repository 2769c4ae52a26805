"""The ASTC codec on shapes nobody thought of: bytes depend on values alone, and every way of reading agrees."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.codecs.table import CODECS
from ingot.codecs.texture.astc_blocks import FOOTPRINTS, Blocks
from ingot.testing.codecs import bits, encode_tensor, read_rows

CODEC = CODECS["astc"]


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(0, 40),
    cols=st.integers(0, 40),
    footprint=st.sampled_from(sorted(FOOTPRINTS)),
    cuts=st.lists(st.integers(1, 40), max_size=4),
    scale=st.sampled_from([0.0, 1e-40, 0.05, 1e30]),
    seed=st.integers(0, 2**32),
)
def test_chunks_and_readers_agree(
    rows: int, cols: int, footprint: str, cuts: list[int], scale: float, seed: int
) -> None:
    source = (np.random.default_rng(seed).normal(size=(rows, cols)) * scale).astype(np.float32)
    options = {"footprint": footprint, "quality": 0}
    whole = encode_tensor(CODEC, source, options, dtype="f32")
    cut = encode_tensor(CODEC, source, options, dtype="f32", cuts=cuts)
    assert all(bytes(whole.parts[role].view()) == bytes(cut.parts[role].view()) for role in whole.parts)
    decoded = whole.numpy()
    assert bits(read_rows(CODEC, whole, "f32", cuts)) == bits(decoded)
    if source.size:
        amax = float(np.abs(source).max())
        assert float(np.abs(decoded).max()) <= amax * (1 + 1e-6)


@given(
    rows=st.integers(0, 10**7),
    cols=st.integers(0, 10**7),
    footprint=st.sampled_from(sorted(FOOTPRINTS)),
)
def test_bands_cover_every_block_once_in_bounded_pieces(rows: int, cols: int, footprint: str) -> None:
    layout = Blocks(rows, cols, *FOOTPRINTS[footprint])
    ends = [layout.band(index) for index in {0, layout.bands // 2, layout.bands - 1} if 0 <= index < layout.bands]
    assert bool(ends) == bool(rows and cols)
    for some, where in ends:
        assert some.start % layout.height == 0
        assert where.stop - where.start == layout.per_row * -(-(some.stop - some.start) // layout.height) * 16
    if ends:
        assert (ends[0][0].start, ends[0][1].start) == (0, 0)
        assert layout.band(layout.bands - 1)[1].stop == layout.nbytes
        columns = list(layout.columns())[:3]
        height = min(layout.band_rows, rows) if len(columns) == 1 else layout.height
        assert all((one.stop - one.start) * height <= max(1 << 16, layout.width * layout.height) for one in columns)
        assert len(columns) == 1 or layout.band_rows == layout.height
