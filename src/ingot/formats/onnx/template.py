"""A model that was read: its files, its graph and the tensors in it; also what a writer starts from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ingot.core.parsing.wire import Bytes, Range
from ingot.errors import FormatError, UsageError
from ingot.formats.onnx.graph import parse_model
from ingot.formats.onnx.sites import find_sites
from ingot.formats.onnx.skim import Skimmed
from ingot.formats.onnx.tensors import Constant
from ingot.model.bytesource import ByteSource
from ingot.model.part import Part
from ingot.model.store import Store

MAX_MODEL = (1 << 31) - 1
"""Bytes of a message that protocol buffers read and write."""
_MOST_FILES = 1 << 16


class Template(Mapping[str, Part]):
    """The files of a model by their names: the model itself, then those that its constants lie in.

    Raises
    ------
    FormatError
        ``onnx.file-size``; those of ``parse_model``; ``onnx.external-link``, ``onnx.external-missing``,
        ``onnx.external-size``.
    UnsupportedError
        ``onnx.no-graph``.
    """

    def __init__(self, store: Store, name: str) -> None:
        self.name = name
        self._files: dict[str, Part] = {}
        self.sources: list[ByteSource] = []
        try:
            self._open(store, name)
        except BaseException:
            self.close()
            raise

    def _open(self, store: Store, name: str) -> None:
        self.source = self._take(store, name)
        if self.source.size > MAX_MODEL:
            raise FormatError(
                "onnx.file-size", f"expected at most {MAX_MODEL} bytes, found {self.source.size}", where=name
            )
        data: Bytes = self.source.view(0, self.source.size) if self.source.mapped else Skimmed(self.source)
        self.model = parse_model(data, self.source.name)
        found = find_sites(self.model)
        self.sites, self.unread = found.sites, found.unread
        self.externals: dict[str, ByteSource] = {}
        for constant in self.model.constants:
            self._locate(store, constant)

    def _take(self, store: Store, name: str) -> ByteSource:
        source = store.open(name)
        self.sources.append(source)
        self._files[name] = Part("u8", source.size, source, where=source.name)
        return source

    def _locate(self, store: Store, constant: Constant) -> None:
        """Open the file that a constant lies in, and check that it does."""
        place = constant.external
        if place is None:
            return
        if place.location not in self.externals:
            self.externals[place.location] = self._external(store, place.location, constant)
        size = self.externals[place.location].size
        wanted = constant.nbytes
        if place.length not in (None, wanted) or place.offset + wanted > size:
            raise FormatError(
                "onnx.external-size",
                f"expected {wanted} bytes, found {place.length} stated at {place.offset} of {place.location!r}, which "
                f"has {size}",
                where=f"{self.name}: {constant.name[:200]}",
            )

    def _external(self, store: Store, location: str, constant: Constant) -> ByteSource:
        where = f"{self.name}: {constant.name[:200]}"
        folder = self.name.rpartition("/")[0]
        path = f"{folder}/{location}" if folder else location
        pieces = path.split("/")
        if any(piece in store.list("/".join(pieces[:depth])).outside for depth, piece in enumerate(pieces)):
            raise FormatError(
                "onnx.external-link",
                f"expected files in the model's folder, found a link that leads out of it: {location!r}; copy the "
                "folder with `cp -rL`",
                where=where,
            )
        if len(self._files) >= _MOST_FILES or path == self.name:
            raise FormatError("onnx.external-path", f"expected a file of data, found {location!r}", where=where)
        try:
            return self._take(store, path)
        except UsageError as error:
            raise FormatError(
                "onnx.external-missing", f"expected the file {location!r}: {error.message}", where=where
            ) from error

    def __getitem__(self, name: str) -> Part:
        return self._files[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    @property
    def headers(self) -> dict[str, bytes]:
        """The bytes of the model beside the numbers of its constants; nothing of other files."""
        ranges = sorted(constant.raw for constant in self.model.constants if constant.raw is not None)
        data, pieces, position = self.model.root.data, [], 0
        for start, end in ranges:
            pieces.append(bytes(data[position:start]))
            position = end
        pieces.append(bytes(data[position : len(data)]))
        return {**dict.fromkeys(self._files, b""), self.name: b"".join(pieces)}

    def part(self, constant: Constant) -> Part:
        """Return the numbers of a constant."""
        return constant.part(self.source, self.externals)

    def bytes_of(self, constant: Constant) -> bytes:
        """Return the numbers of a small constant."""
        return bytes(self.part(constant).view())

    def copied(self, piece: Range, size: int) -> Iterator[tuple[int, bytes]]:
        """Yield a range of the model's file in pieces of at most ``size`` bytes, each with where it begins."""
        for start in range(piece.start, piece.end, size):
            yield start - piece.start, bytes(self.model.root.data[start : min(start + size, piece.end)])

    def close(self) -> None:
        """Close all files."""
        for source in self.sources:
            source.close()
