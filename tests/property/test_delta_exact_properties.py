"""delta_exact over any shape, element type, bits, changes and cuts: exact, and no larger than a mode per chunk more."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.codecs.delta.exact import ExactDelta
from ingot.codecs.delta.exact_chunks import pack, params_for, unpack
from ingot.core.numeric.dtypes import DTYPES, numpy_dtype
from ingot.model.part import memory_part
from ingot.model.tensor import Tensor
from ingot.testing.codecs import bits, chunks
from tests.support.reference import delta_exact as reference
from tests.support.strategies import Array, arrays, shapes

CODEC = ExactDelta()
TYPES = st.sampled_from([row.name for row in DTYPES.values() if row.bits >= 8 and row.category != "c"])
CUTS = st.lists(st.integers(0, 6400), max_size=6).map(tuple)


@st.composite
def pairs(draw: st.DrawFn, dtype: str) -> tuple[Array, Array]:
    """Any bits; or words near each other, of which a share differs, by steps of any size."""
    if draw(st.booleans()):
        shape = draw(shapes(max_side=12))
        return draw(arrays(shape, dtype)), draw(arrays(shape, dtype))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = draw(st.tuples(st.integers(1, 80), st.integers(1, 80)))
    width = numpy_dtype(dtype).itemsize
    top = 1 << draw(st.integers(1, 8 * width - 1))
    base = rng.integers(0, top, shape, np.uint64)
    steps = rng.geometric(2.0 ** -draw(st.integers(0, 8 * width - 2)), shape).astype(np.uint64)
    steps = np.where(rng.random(shape) < 0.5, steps, -steps)
    tuned = np.where(rng.random(shape) < draw(st.sampled_from([0.0, 0.01, 0.08, 0.5, 1.0])), base + steps, base)
    mask = np.uint64(1 if dtype == "bool" else (1 << 8 * width) - 1)
    old, new = ((words & mask).astype(f"u{width}").view(numpy_dtype(dtype)) for words in (base, tuned))
    return old, new


@settings(deadline=None)  # never assert a time
@given(st.data(), TYPES, st.sampled_from([256, 1024, 1 << 17]), CUTS, st.booleans())
def test_applying_gives_the_fine_tune(
    data: st.DataObject, dtype: str, chunk: int, cuts: tuple[int, ...], in_place: bool
) -> None:
    base, tuned = data.draw(pairs(dtype))
    encoder = CODEC.encoder(base.shape, dtype, {"chunk": chunk})
    arrays = encoder.encode(base, tuned)
    assert arrays["planes"].size <= encoder.parts[1].at_most
    parts = {spec.role: memory_part(arrays[spec.role], spec.dtype) for spec in encoder.parts}
    tensor = Tensor("t", base.shape, dtype, encoder.codec, parts, dict(encoder.params))
    rows = base.reshape(-1, 1).copy()
    out = rows if in_place else np.empty_like(rows)
    applier = CODEC.applier(tensor, dtype)
    for piece in chunks(len(rows), cuts):
        applier.apply(rows[piece], out[piece])
    applier.finish()
    assert bits(out) == bits(tuned)


@settings(deadline=None)
@given(st.data(), TYPES, st.sampled_from([256, 1024]))
def test_packing_is_what_the_encoder_does(data: st.DataObject, dtype: str, chunk: int) -> None:
    base, tuned = data.draw(pairs(dtype))
    parts = pack(base, tuned, chunk=chunk, workers=0)
    wanted = CODEC.encoder(base.shape, dtype, {"chunk": chunk}).encode(base, tuned)
    assert {role: bits(part) for role, part in parts.items()} == {role: bits(part) for role, part in wanted.items()}
    back = base.copy()
    unpack(parts, back, back, chunk=chunk, workers=0)
    assert bits(back) == bits(tuned)


@settings(deadline=None, max_examples=40)  # the reference takes its time
@given(st.data(), TYPES)
def test_the_reference_writes_and_reads_the_same_bytes(data: st.DataObject, dtype: str) -> None:
    base, tuned = data.draw(pairs(dtype))
    parts = pack(base, tuned, chunk=1024, workers=0)
    sizes, planes = parts["sizes"].tolist(), parts["planes"].tobytes()
    floats, shift = params_for(dtype).element
    old, new = (values.reshape(-1).view(f"u{values.dtype.itemsize}") for values in (base, tuned))
    assert (sizes, planes) == reference.encode(old, new, 1024, floats=floats, shift=shift)
    assert bits(reference.apply(sizes, planes, 1024, old, floats=floats, shift=shift)) == bits(tuned)
