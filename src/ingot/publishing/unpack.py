"""Unpack the layers of an artifact that are tar archives, while they arrive, into a staging folder."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from ingot.core.bytes.checksums import Sha256
from ingot.core.files.archive import NameChecker
from ingot.core.files.tar_stream import decompressed, tar_files
from ingot.core.runtime.parallel import check_cancelled
from ingot.core.runtime.progress import Progress
from ingot.errors import FormatError
from ingot.model.bytesource import ByteSource
from ingot.stores.local import LocalTarget
from ingot.stores.registry.manifest import Archive
from ingot.stores.registry.store import RegistryStore

_WINDOW = 64 << 20  # read by several requests at once


def unpack_layers(
    store: RegistryStore, target: LocalTarget, require_room: Callable[[int], None], progress: Progress
) -> dict[str, int]:
    """Write the files of all archives; return their sizes by name.

    The files may be used only after this function has returned: a layer's digest is compared after its last byte.

    Raises
    ------
    FormatError, UnsupportedError
        ``tar.stream``, ``tar.entry``; ``registry.name``: a name that is refused, or that another layer has too.
    IntegrityError
        ``registry.digest``, ``registry.size``.
    """
    checker = NameChecker()
    for name in store.manifest.files:
        checker.add(name)
    sizes: dict[str, int] = {}
    for archive in store.manifest.archives:
        with closing(store.open_layer(archive.blob)) as source:
            _unpack(store, archive, _Layer(source, progress), target, checker, require_room, sizes)
    return sizes


def _unpack(
    store: RegistryStore,
    archive: Archive,
    layer: _Layer,
    target: LocalTarget,
    checker: NameChecker,
    require_room: Callable[[int], None],
    sizes: dict[str, int],
) -> None:
    location = f"{store.location}: layer {archive.blob.digest}"
    read = decompressed(layer.read, archive.compression, location)
    try:
        for file in tar_files(read, checker, location):
            require_room(sum(sizes.values()) + file.size)
            with closing(target.create(file.name)) as sink:
                offset = 0
                for chunk in file.chunks:
                    check_cancelled()
                    sink.write_at(offset, memoryview(chunk))
                    offset += len(chunk)
                sink.truncate(file.size)
            sizes[file.name] = file.size
    except FormatError as error:
        if error.rule is not None and error.rule.startswith("archive."):
            raise FormatError("registry.name", error.message, where=f"{location}: {error.where}") from None
        raise
    archive.blob.check(layer.digest(), location)


class _Layer:
    """Reads a layer from the first byte to the last, and hashes it."""

    def __init__(self, source: ByteSource, progress: Progress) -> None:
        self._source = source
        self._progress = progress
        self._buffer = memoryview(b"")
        self._offset = 0
        self._hasher = Sha256()

    def read(self, count: int) -> bytes:
        """Return the next bytes, at most ``count``; empty at the end."""
        if not self._buffer and self._offset < self._source.size:
            check_cancelled()
            window = memoryview(bytearray(min(_WINDOW, self._source.size - self._offset)))
            self._source.readinto(self._offset, window)
            self._hasher.update(window)
            self._offset += window.nbytes
            self._progress.advance(window.nbytes)
            self._buffer = window
        data = bytes(self._buffer[:count])
        self._buffer = self._buffer[count:]
        return data

    def digest(self) -> str:
        """Return the digest of all bytes; this method first reads all remaining bytes."""
        while self.read(_WINDOW):
            pass
        return self._hasher.text()
