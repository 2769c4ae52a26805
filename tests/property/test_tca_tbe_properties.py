"""Any bf16 bits, any window: exact; parts equal the reference; damaged parts give values or a refusal."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.codecs.lossless.tca_tbe import TcaCodec
from ingot.errors import CodecError
from ingot.model.part import Part, memory_part
from ingot.model.tensor import Array
from ingot.testing.codecs import bits, encode_tensor, read_rows, zstd_part
from ingot.testing.values import random_bits
from tests.support.reference import tca_tbe as reference

CODEC = TcaCodec()
CUTS = st.lists(st.integers(0, 200), max_size=4).map(tuple)
STARTS = st.one_of(st.none(), st.integers(-1, 248))


@st.composite
def matrices(draw: st.DrawFn) -> Array:
    """Weights, a few exponents, or any bits, of a size around one, two and three tiles."""
    shape = (draw(st.integers(0, 200)), draw(st.integers(0, 140)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(("weights", "window", "bits")))
    if kind == "bits":
        return random_bits(rng, shape, "bf16", zeros=draw(st.sampled_from((0.0, 0.9))))
    if kind == "weights":
        return rng.normal(0, 2.0 ** draw(st.integers(-120, 120)), shape).astype(ml_dtypes.bfloat16)
    exponents = rng.integers(draw(st.integers(0, 249)), 256, shape)
    return (exponents << 7 | rng.integers(0, 256, shape) << 8 & 0x807F).astype(np.uint16).view(ml_dtypes.bfloat16)


@given(matrices(), STARTS, CUTS, st.booleans())
@settings(max_examples=60)
def test_exact_and_equal_to_the_reference(
    source: Array, start: int | None, cuts: tuple[int, ...], compressed: bool
) -> None:
    options = {} if start is None else {"start": start}
    tensor = encode_tensor(CODEC, source, options, dtype="bf16", cuts=cuts)
    counts = np.bincount(source.view(np.uint16).reshape(-1) >> 7 & 0xFF, minlength=256)
    assert tensor.params["start"] == (reference.window(counts) if start is None else start)
    wanted = reference.encode(source.view(np.uint16), tensor.params["start"])
    for role, array in wanted.items():
        assert bytes(tensor.parts[role].view()) == array.tobytes(), role
    assert bits(reference.decode(wanted, tensor.params["start"], source.shape)) == bits(source)
    if compressed:
        tensor = replace(tensor, parts={role: zstd_part(part) for role, part in tensor.parts.items()})
    assert bits(tensor.numpy()) == bits(source)
    assert bits(read_rows(CODEC, tensor, "bf16", cuts)) == bits(source)


def damage(rng: np.random.Generator, part: Part) -> Part:
    """Flip, swap or cut some bytes of a part; its size stays where ``check`` would see a change."""
    data = np.frombuffer(part.view(), np.uint8).copy()
    for _ in range(rng.integers(1, 4)):
        if len(data):
            data[rng.integers(len(data))] ^= np.uint8(1 << rng.integers(8))
    if rng.random() < 0.1:
        data = data[: rng.integers(len(data) + 1)]
    if rng.random() < 0.1:
        data = np.append(data, np.zeros(16, np.uint8))
    return replace(memory_part(data, "u8"), dtype=part.dtype)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_damaged_parts_are_values_or_refused(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = (int(rng.integers(1, 140)), int(rng.integers(1, 140)))
    source = random_bits(rng, shape, "bf16", zeros=rng.choice([0.0, 0.8]))
    tensor = encode_tensor(CODEC, source, {}, dtype="bf16")
    for _ in range(50):
        chosen = rng.choice(list(tensor.parts), int(rng.integers(1, 4)))
        parts = {**tensor.parts, **{role: damage(rng, tensor.parts[role]) for role in chosen}}
        wrong = replace(tensor, parts=parts)
        results: list[bytes | str] = []
        for way in (wrong.numpy, lambda wrong=wrong: read_rows(CODEC, wrong, "bf16", (1, 64, 70))):
            try:
                results.append(bits(way()))
            except CodecError as error:
                results.append(error.rule or "")
        assert results[0] == results[1]
        assert isinstance(results[0], bytes) or results[0] in ("tca_tbe.counts", "tca_tbe.size")
