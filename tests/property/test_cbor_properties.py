"""CBOR against cbor2, both ways: what one writes, the other reads to the same value."""

from __future__ import annotations

import math

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.parsing import cbor
from ingot.errors import FormatError, IngotError

SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**64), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary()
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5), max_leaves=25
)


def same(a: object, b: object) -> bool:
    """Equality that tells 1 from 1.0 and True, and 0.0 from -0.0."""
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return a == b and math.copysign(1, a) == math.copysign(1, b)
    return type(a) is type(b) and a == b


@given(VALUES)
def test_our_bytes_are_read_by_the_oracle_and_by_us(value: object) -> None:
    data = cbor.dumps(value)
    assert same(cbor2.loads(data), value)
    assert same(cbor.loads(data), value)


@given(VALUES)
def test_the_oracles_bytes_are_read_by_us(value: object) -> None:
    assert same(cbor.loads(cbor2.dumps(value)), value)


@given(st.floats())
def test_floats_are_the_canonical_ones(value: float) -> None:
    assert cbor.dumps(value) == cbor2.dumps(value, canonical=True)


@given(VALUES, st.data())
def test_every_truncation_is_refused(value: object, data: st.DataObject) -> None:
    encoded = cbor.dumps(value)
    cut = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(FormatError) as caught:
        cbor.loads(encoded[:cut])
    assert caught.value.rule in ("cbor.truncated", "cbor.length")


@given(VALUES, st.binary(min_size=1))
def test_every_trailing_byte_is_refused(value: object, tail: bytes) -> None:
    with pytest.raises(FormatError) as caught:
        cbor.loads(cbor.dumps(value) + tail)
    assert caught.value.rule == "cbor.trailing-bytes"


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_or_mean_what_the_oracle_says(data: bytes) -> None:
    refused: str | None = None
    value = None
    try:
        value = cbor.loads(data)
    except IngotError as error:
        refused = error.rule
    if refused is None:
        assert cbor.dumps(value) == cbor.dumps(cbor2.loads(data))
    else:
        assert refused.startswith("cbor.")


@given(st.binary(max_size=60))
def test_text_is_accepted_exactly_where_python_decodes_utf8(payload: bytes) -> None:
    head = cbor.dumps(b"x" * len(payload))[: -len(payload) or None]
    data = bytes([head[0] | 0x20]) + head[1:] + payload
    try:
        expected: str | None = payload.decode()
    except UnicodeDecodeError:
        expected = None
    if expected is None:
        with pytest.raises(FormatError) as caught:
            cbor.loads(data)
        assert caught.value.rule == "cbor.utf8"
    else:
        assert cbor.loads(data) == expected
