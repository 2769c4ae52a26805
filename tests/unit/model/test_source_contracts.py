"""The base classes of byte sources: memory and proofs of derived bytes, and states of files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ingot.codecs.affine.windows import ComputedRows
from ingot.core.bytes import encodings
from ingot.ext.squish.npydir.arrays import ZstdFile
from ingot.formats.shared.numbers import ComputedSource, ConvertedSource
from ingot.model.bytesource import DerivedSource, MemorySource, Stamp, StampedSource
from ingot.model.part import Part
from ingot.model.reading.concat_source import verify_sources
from ingot.stores.local import LocalStore


class Proved(MemorySource, DerivedSource):
    """A source that counts how often it is proved."""

    proofs = 0

    def verify_sources(self) -> None:
        self.proofs += 1


def test_a_derived_source_needs_no_memory_unless_it_says_so() -> None:
    source = DerivedSource()
    assert (source.working_bytes(), source.computing_bytes()) == (0, 0)
    source.verify_sources()


def test_derived_sources_state_their_memory() -> None:
    rows = ComputedRows(
        MemorySource(b""), 16, 8, lambda first, last: np.zeros((last - first, 8), np.uint8), extra_bytes=5
    )
    assert rows.working_bytes() == 2 * 16 * 8 + 5
    assert ConvertedSource(lambda: b"1234", 4, "x").working_bytes() == 8
    computed = ComputedSource(lambda: b"1234", 4, 100, "x")
    assert (computed.computing_bytes(), computed.working_bytes()) == (100, 0)


def test_only_a_derived_source_is_proved() -> None:
    source = Proved(b"1234")
    verify_sources(Part("u8", 4, source))
    verify_sources(Part("u8", 4, MemorySource(b"1234")))
    assert source.proofs == 1


def test_a_compressed_file_has_the_state_of_the_file(tmp_path: Path) -> None:
    data = encodings.compress_frame(b"x" * 100, 3)
    (tmp_path / "a.zst").write_bytes(data)
    file = LocalStore(tmp_path, "pread").open("a.zst")
    opened = ZstdFile(file, 100)
    assert isinstance(file, StampedSource)
    assert isinstance(opened, StampedSource)
    assert opened.stamp == file.stamp
    opened.close()
    assert ZstdFile(MemorySource(data), 100).stamp == Stamp(len(data))
