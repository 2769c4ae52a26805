"""A model that was read: its files, its graph and its tensors. Writers fill a copy of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import overload

from ingot.core.parsing.wire import Bytes, Range
from ingot.errors import FormatError, UsageError
from ingot.formats.onnx.graph import parse_model
from ingot.formats.onnx.sites import find_sites
from ingot.formats.onnx.tensors import Constant
from ingot.model.bytesource import ByteSource
from ingot.model.part import Part
from ingot.model.store import Store

_WINDOW = 1 << 16


class WindowedBytes:
    """The bytes of a source, with a cache of one window."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._size = source.size
        self._start = 0
        self._cached = b""

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int, /) -> int: ...
    @overload
    def __getitem__(self, index: slice, /) -> bytes: ...
    def __getitem__(self, index: int | slice, /) -> int | bytes:
        if isinstance(index, int):
            return self[index : index + 1][0]
        start, stop, _ = index.indices(self._size)
        if start >= stop:
            return b""
        if not (self._start <= start and stop <= self._start + len(self._cached)):
            if stop - start > _WINDOW:
                return self._read(start, stop)
            self._start, self._cached = start, self._read(start, min(start + _WINDOW, self._size))
        return self._cached[start - self._start : stop - self._start]

    def _read(self, start: int, stop: int) -> bytes:
        out = bytearray(stop - start)
        self._source.readinto(start, memoryview(out))
        return bytes(out)


MAX_MODEL = (1 << 31) - 1
"""Maximum bytes of a message in protocol buffers."""
_MAX_FILES = 1 << 16


class Template(Mapping[str, Part]):
    """The files of a model by name: the model file, then the separate files of its constants.

    Raises
    ------
    FormatError
        ``onnx.file-size``; the errors of ``parse_model``; ``onnx.external-link``, ``onnx.external-missing``,
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
        data: Bytes = self.source.view(0, self.source.size) if self.source.mapped else WindowedBytes(self.source)
        self.model = parse_model(data, self.source.name)
        tensors = find_sites(self.model)
        self.sites, self.unread = tensors.sites, tensors.unread
        self.externals: dict[str, ByteSource] = {}
        for constant in self.model.constants:
            self._locate(store, constant)

    def _take(self, store: Store, name: str) -> ByteSource:
        source = store.open(name)
        self.sources.append(source)
        self._files[name] = Part("u8", source.size, source, where=source.name)
        return source

    def _locate(self, store: Store, constant: Constant) -> None:
        """Open the file that contains a constant, and check that the constant is inside it."""
        external = constant.external
        if external is None:
            return
        if external.location not in self.externals:
            self.externals[external.location] = self._external(store, external.location, constant)
        size = self.externals[external.location].size
        nbytes = constant.nbytes
        if external.length not in (None, nbytes) or external.offset + nbytes > size:
            raise FormatError(
                "onnx.external-size",
                f"expected {nbytes} bytes, found {external.length} at {external.offset} of {external.location!r}, "
                "which "
                f"has {size}",
                where=f"{self.name}: {constant.name[:200]}",
            )

    def _external(self, store: Store, location: str, constant: Constant) -> ByteSource:
        constant_location = f"{self.name}: {constant.name[:200]}"
        folder = self.name.rpartition("/")[0]
        path = f"{folder}/{location}" if folder else location
        components = path.split("/")
        if any(
            component in store.list("/".join(components[:depth])).outside for depth, component in enumerate(components)
        ):
            raise FormatError(
                "onnx.external-link",
                f"expected files in the model's folder, found a link to a location outside of it: {location!r}; copy "
                "the "
                "folder with `cp -rL`",
                where=constant_location,
            )
        if len(self._files) >= _MAX_FILES or path == self.name:
            raise FormatError(
                "onnx.external-path", f"expected a file of data, found {location!r}", where=constant_location
            )
        try:
            return self._take(store, path)
        except UsageError as error:
            raise FormatError(
                "onnx.external-missing", f"expected the file {location!r}: {error.message}", where=constant_location
            ) from error

    def __getitem__(self, name: str) -> Part:
        return self._files[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    @property
    def headers(self) -> dict[str, bytes]:
        """Headers by file name: the model file without the numbers of its constants; empty bytes for other files."""
        ranges = sorted(constant.raw for constant in self.model.constants if constant.raw is not None)
        data = self.model.root.data
        segments = []
        position = 0
        for start, end in ranges:
            segments.append(bytes(data[position:start]))
            position = end
        segments.append(bytes(data[position : len(data)]))
        return {**dict.fromkeys(self._files, b""), self.name: b"".join(segments)}

    def part(self, constant: Constant) -> Part:
        """Return the numbers of a constant as a part."""
        return constant.part(self.source, self.externals)

    def bytes_of(self, constant: Constant) -> bytes:
        """Return the bytes of a small constant."""
        return bytes(self.part(constant).view())

    def chunks_of(self, byte_range: Range, size: int) -> Iterator[tuple[int, bytes]]:
        """Yield a range of the model's file in chunks of at most ``size`` bytes, each with its offset in the range."""
        for start in range(byte_range.start, byte_range.end, size):
            yield start - byte_range.start, bytes(self.model.root.data[start : min(start + size, byte_range.end)])

    def close(self) -> None:
        """Close the model's file and the separate files of constants."""
        for source in self.sources:
            source.close()
