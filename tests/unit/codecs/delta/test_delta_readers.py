"""How parts of a difference are read while it is added: lent where they lie in memory, elsewhere read in pieces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ingot.codecs.delta.readers import Codes, ElementReader, values_of
from ingot.codecs.table import CODECS
from ingot.core.bytes.checksums import digest
from ingot.core.numeric.buffers import HUGE_PAGE
from ingot.core.numeric.dtypes import cast
from ingot.errors import IntegrityError
from ingot.model.bytesource import MemorySource
from ingot.model.part import Part, memory_part
from ingot.testing.codecs import bits, encode_tensor

OPTIONS: dict[str, dict[str, Any]] = {
    "delta_sparse": {"sparsity": 0.3},
    "delta_sign": {},
    "delta_int4": {"outlier_fraction": 0.01},
}


def with_digest(part: Part) -> Part:
    return replace(part, digest=digest("sha256", part.view()))


def test_what_lies_in_memory_is_lent() -> None:
    array = np.arange(1000, dtype=np.int64)
    assert np.shares_memory(values_of(memory_part(array, "i64")).next(10), array)
    packed = np.arange(200, dtype=np.uint8)
    assert np.shares_memory(Codes(memory_part(packed, "u8"), 4).next(10)[0], packed)


def test_what_has_a_digest_or_an_odd_address_is_copied() -> None:
    array = np.arange(1000, dtype=np.int64)
    assert isinstance(values_of(with_digest(memory_part(array, "i64"))), ElementReader)
    shifted = Part(dtype="i64", length=7992, source=MemorySource(array.tobytes()), offset=3)
    values = values_of(shifted).next(2)
    assert values.flags.aligned
    assert values.tobytes() == array.tobytes()[3:19]


@pytest.mark.parametrize("bits_each", [1, 4])
@pytest.mark.parametrize("lies", [True, False])
def test_codes_come_in_any_pieces(bits_each: int, lies: bool) -> None:
    packed = np.random.default_rng(0).integers(0, 256, 60, np.uint8)
    wide = np.unpackbits(packed).reshape(-1, bits_each)
    part = memory_part(packed, "u8") if lies else with_digest(memory_part(packed, "u8"))
    codes, at = Codes(part, bits_each), 0
    for count in (0, 3, 1, 0, 5, 8, 16, 1, 2, 31, 0):
        found, first = codes.next(count)
        every = np.unpackbits(found).reshape(-1, bits_each)
        assert np.array_equal(every[first : first + count], wide[at : at + count])
        at += count
    for skipped in (1, 8, 3, 0):
        codes.skip(skipped)
        at += skipped
        found, first = codes.next(3)
        assert np.array_equal(np.unpackbits(found).reshape(-1, bits_each)[first : first + 3], wide[at : at + 3])
        at += 3


def test_a_wrong_digest_is_seen_though_bytes_lie_in_memory() -> None:
    part = replace(with_digest(memory_part(np.arange(100, dtype=np.uint8), "u8")), digest="sha256:" + "0" * 64)
    codes = Codes(part, 4)
    codes.next(7)
    with pytest.raises(IntegrityError):
        codes.finish()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("id", OPTIONS)
def test_adding_crosses_pieces_and_pages(id: str, dtype: str) -> None:
    """What lies in the output before, and which pages begin in it, say nothing."""
    codec, rng = CODECS[id], np.random.default_rng(0)
    shape = (3, (1 << 19) + HUGE_PAGE // 8 + 13)
    tensor = encode_tensor(codec, rng.normal(0, 0.01, shape).astype(np.float32), OPTIONS[id], dtype="f32")
    base = cast(rng.normal(0, 1, shape).astype(np.float32), dtype)
    room = np.full(base.nbytes + 64, 0xA5, np.uint8)
    found = room[32:-32].view(base.dtype).reshape(shape)
    read = replace(tensor, parts={role: with_digest(part) for role, part in tensor.parts.items()})
    codec.reader(tensor).add_into(base, found)
    again = base.copy()
    codec.reader(read).add_into(again, again)
    expected = (base.astype(np.float32) + tensor.numpy("f32")).astype(base.dtype)
    assert bits(found) == bits(again) == bits(expected)
    assert bytes(room[:32]) == bytes(room[-32:]) == b"\xa5" * 32
