"""The files of an artifact, reassembled from the library's objects."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator

from ingot.core.bytes.checksums import Blake3
from ingot.core.runtime.parallel import check_cancelled
from ingot.errors import FormatError, IntegrityError, UsageError
from ingot.library.manifest import Chunk, File, Manifest
from ingot.library.objects import Objects
from ingot.model.bytesource import ByteSource, JoinedSource, Sink
from ingot.model.store import Listing, Store, checked_name

_ZEROS = bytes(1 << 20)
_MAX_CACHED = 256 << 20


def contents(objects: Objects, file: File) -> Iterator[memoryview]:
    """Yield a file's contents in chunks; each object is compared with its digest.

    Raises the errors of ``Objects.values``, and ``IntegrityError`` ``library.digest`` at the end if the file differs.
    """
    hasher = Blake3()
    for chunk in file.chunks:
        for data in _bytes_of(objects, chunk):
            check_cancelled()
            hasher.update(data)
            yield data
    if hasher.text() != file.digest:
        raise IntegrityError(
            "library.digest",
            f"expected the file that was added, {file.digest}, found {hasher.text()}: its manifest is wrong",
            where=file.name,
        )


def _bytes_of(objects: Objects, chunk: Chunk) -> Iterator[memoryview]:
    if chunk.object:
        yield objects.values(chunk.object, chunk.size)
    elif chunk.data:
        yield memoryview(chunk.data)
    else:
        for start in range(0, chunk.size, len(_ZEROS)):
            yield memoryview(_ZEROS)[: min(len(_ZEROS), chunk.size - start)]


def write_file(objects: Objects, file: File, sink: Sink) -> Iterator[int]:
    """Write a file to a sink; yield the size of each chunk in bytes. Raises the errors of ``contents``."""
    offset = 0
    for data in contents(objects, file):
        sink.write_at(offset, data)
        offset += data.nbytes
        yield data.nbytes
    sink.truncate(offset)


class ArtifactStore(Store):
    """An artifact of a library as a store; objects are decoded on access.

    Recently used objects stay in memory, up to 256 MiB, or one object if it is larger.

    Parameters
    ----------
    objects : Objects
    manifest : Manifest
    address : str
        The address of this store.
    inside : str
        The folder within the artifact that this store shows; empty for the entire artifact.
    """

    def __init__(self, objects: Objects, manifest: Manifest, address: str, inside: str = "") -> None:
        self.objects = objects
        self.manifest = manifest
        self._start = f"{inside}/" if inside else ""
        self._files = {
            file.name.removeprefix(self._start): file for file in manifest.files if file.name.startswith(self._start)
        }
        self.location = self.url = address
        self._cached: OrderedDict[str, memoryview] = OrderedDict()
        self._lock = threading.Lock()

    def list(self, folder: str = "") -> Listing:
        start = f"{checked_name(folder, self.location)}/" if folder else ""
        inside = [name.removeprefix(start) for name in self._files if name.startswith(start)]
        files = sorted(name for name in inside if "/" not in name)
        return Listing(tuple(files), tuple(sorted({name.partition("/")[0] for name in inside if "/" in name})))

    def open(self, name: str) -> ByteSource:
        file = self._files.get(checked_name(name, self.location))
        if file is None:
            raise UsageError(
                "expected an existing file, but there is none", rule="store.missing", where=self.location_of(name)
            )
        return _FileSource(self, file, self.location_of(name))

    def values(self, chunk: Chunk) -> memoryview:
        """Return an object's bytes, from the cache if it was decoded recently."""
        with self._lock:
            data = self._cached.get(chunk.object)
            if data is None:
                data = self._cached[chunk.object] = self.objects.values(chunk.object, chunk.size)
                while len(self._cached) > 1 and sum(item.nbytes for item in self._cached.values()) > _MAX_CACHED:
                    self._cached.popitem(last=False)
            else:
                self._cached.move_to_end(chunk.object)
            if data.nbytes != chunk.size:
                raise FormatError("library.object", f"expected {chunk.size} bytes, found {data.nbytes}")
            return data


class _FileSource(JoinedSource):
    """A byte source for a file of an artifact; its objects are decoded on access."""

    def __init__(self, store: ArtifactStore, file: File, name: str) -> None:
        super().__init__((chunk.size for chunk in file.chunks), name)
        self._store = store
        self._file = file

    def read_span(self, index: int, offset: int, out: memoryview) -> None:
        """Copy bytes of a chunk: of its object, of its inline data, or zeros."""
        chunk = self._file.chunks[index]
        end = offset + out.nbytes
        if chunk.object:
            out[:] = self._store.values(chunk)[offset:end]
        else:
            out[:] = chunk.data[offset:end] if chunk.data else bytes(out.nbytes)

    def changed(self) -> bool:
        return False

    def close(self) -> None:
        """Do nothing: the store owns the decoded objects."""
