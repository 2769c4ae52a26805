"""float_entropy over any shape, float type, level, bits and cuts: exact, and no larger than a mode per plane more."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.codecs.lossless.float_entropy import EntropyCodec
from ingot.core.numeric.dtypes import DTYPES, numpy_dtype
from ingot.testing.codecs import bits, encode_tensor, read_rows, zstd_part
from tests.support.reference import float_entropy as reference
from tests.support.strategies import Array, arrays, shapes

CODEC = EntropyCodec()
TYPES = st.sampled_from([row.name for row in DTYPES.values() if row.is_float and row.bits >= 8])
OPTIONS = st.fixed_dictionaries(
    {"level": st.sampled_from(["fast", "max"]), "chunk": st.sampled_from([256, 1024, 1 << 17])}
)
CUTS = st.lists(st.integers(0, 80), max_size=4).map(tuple)


@st.composite
def tensors(draw: st.DrawFn, dtype: str) -> Array:
    """Any bits, or few values in many places, so that every kind of plane comes up."""
    if draw(st.booleans()):
        return draw(arrays(draw(shapes(max_side=12)), dtype))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = draw(st.tuples(st.integers(1, 80), st.integers(1, 80)))
    width = numpy_dtype(dtype).itemsize
    values = np.frombuffer(rng.bytes(width * 256), f"u{width}")[: draw(st.sampled_from([1, 2, 5, 40, 256]))]
    picks = np.minimum(rng.geometric(draw(st.sampled_from([0.02, 0.2, 0.7])), shape) - 1, values.size - 1)
    return values[picks].view(numpy_dtype(dtype))


@settings(deadline=None)  # never assert a time
@given(st.data(), TYPES, OPTIONS, CUTS, st.booleans())
def test_round_trips_are_exact(
    data: st.DataObject, dtype: str, options: dict[str, object], cuts: tuple[int, ...], compressed: bool
) -> None:
    source = data.draw(tensors(dtype))
    tensor = encode_tensor(CODEC, source, options, dtype=dtype, cuts=cuts)
    encoder = CODEC.encoder(source.shape, dtype, options)
    assert tensor.parts["planes"].length <= encoder.parts[1].at_most
    if compressed:
        tensor.parts = {role: zstd_part(part) for role, part in tensor.parts.items()}
    assert bits(tensor.numpy()) == bits(source)
    assert bits(read_rows(CODEC, tensor, dtype, cuts)) == bits(source)


@settings(deadline=None, max_examples=40)  # the reference takes its time
@given(st.data(), TYPES, st.booleans())
def test_the_reference_writes_and_reads_the_same_bytes(data: st.DataObject, dtype: str, max: bool) -> None:
    source = data.draw(tensors(dtype))
    words = source.reshape(-1).view(f"u{source.dtype.itemsize}")
    tensor = encode_tensor(CODEC, source, {"level": "max" if max else "fast", "chunk": 1024}, dtype=dtype)
    sizes, planes = tensor.parts["sizes"].array().tolist(), bytes(tensor.parts["planes"].view())
    assert (sizes, planes) == reference.encode(words, 1024, max=max, joint=dtype in ("bf16", "f32"))
    assert bits(reference.decode(sizes, planes, 1024, words.size, words.dtype.itemsize)) == bits(source)
