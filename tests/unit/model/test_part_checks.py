"""What a part remembers of its checks: bytes are checked once, and no other part inherits the result."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ingot.core.bytes import checksums
from ingot.errors import IntegrityError
from ingot.model.bytesource import DerivedSource, MemorySource
from ingot.model.part import Part

DATA = bytes(range(64))
WRONG = "crc32c:0xdeadbeef"


def part_of(source: MemorySource) -> Part:
    return Part("u8", 64, source, digest=checksums.digest("crc32c", DATA))


class Unmapped(MemorySource):
    """Bytes that are read anew, into a buffer of their own, each time."""

    mapped = False

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.reads = 0

    def view(self, offset: int, length: int) -> memoryview:
        self.reads += 1
        return memoryview(bytearray(super().view(offset, length)))


def test_mapped_bytes_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    part = part_of(MemorySource(DATA))
    part.stored()
    monkeypatch.setattr(checksums, "check", lambda *_: pytest.fail("checked again"))
    assert bytes(part.stored()) == DATA


def test_bytes_that_are_not_mapped_are_checked_at_each_read() -> None:
    source = Unmapped(DATA)
    part = part_of(source)
    part.stored()
    source._data = memoryview(bytes(64))  # another process writes to the file
    with pytest.raises(IntegrityError):
        part.stored()


@pytest.mark.parametrize("read_first", [True, False])
def test_a_replaced_part_is_checked_by_its_own_digest(read_first: bool) -> None:
    part = part_of(MemorySource(DATA))
    if read_first:
        part.stored()
        part.by_ranges()
    other = replace(part, digest=WRONG)
    part.stored()
    with pytest.raises(IntegrityError):
        other.stored()
    with pytest.raises(IntegrityError):
        other.by_ranges().view()


def test_parts_for_ranges_share_the_checks() -> None:
    part = part_of(MemorySource(DATA))
    part.by_ranges().readinto(0, memoryview(bytearray(8)))
    assert part.by_ranges().proven() == part.proven() == {0}
    assert replace(part).proven() == set()


def test_private_bytes_are_read_once_and_are_no_others() -> None:
    source = Unmapped(DATA)
    part = part_of(source)
    private = part.private()
    private.stored()[0] = 255
    assert private.stored()[0] == 255
    assert source.reads == 1
    assert bytes(part.stored()) == DATA
    assert bytes(replace(private, digest=None).stored()) == DATA  # another part reads for itself


def test_integers_are_those_of_the_source() -> None:
    class Integers(MemorySource, DerivedSource):
        """Computed values."""

    source = Integers(DATA)
    assert (part_of(source).integers, part_of(MemorySource(DATA)).integers) == (None, None)
    source.integers = (0, 15)
    assert part_of(source).integers == (0, 15)
