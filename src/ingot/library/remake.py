"""An artifact's files, made again from the library's objects."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator

from ingot.core.bytes.checksums import Blake3
from ingot.core.numeric.dtypes import require_inside
from ingot.core.runtime.parallel import go_on
from ingot.errors import FormatError, IntegrityError, UsageError
from ingot.library.manifest import File, Manifest, Piece
from ingot.library.objects import Objects
from ingot.model.bytesource import ByteSource, Sink
from ingot.model.store import Listing, Store, checked_name

_ZEROS = bytes(1 << 20)
_HELD = 256 << 20


def contents(objects: Objects, file: File) -> Iterator[memoryview]:
    """Yield a file's bytes, piece by piece; each object is compared with its name.

    Raises what ``Objects.values`` does, and ``IntegrityError`` ``library.digest`` at the end where the file is another.
    """
    running = Blake3()
    for piece in file.pieces:
        for data in _bytes_of(objects, piece):
            go_on()
            running.update(data)
            yield data
    if running.text() != file.digest:
        raise IntegrityError(
            "library.digest",
            f"expected the file that was added, {file.digest}, found {running.text()}: its manifest is wrong",
            where=file.name,
        )


def _bytes_of(objects: Objects, piece: Piece) -> Iterator[memoryview]:
    if piece.object:
        yield objects.values(piece.object, piece.size)
    elif piece.data:
        yield memoryview(piece.data)
    else:
        for start in range(0, piece.size, len(_ZEROS)):
            yield memoryview(_ZEROS)[: min(len(_ZEROS), piece.size - start)]


def write_file(objects: Objects, file: File, sink: Sink) -> Iterator[int]:
    """Write a file into a sink; yield the bytes of each piece; errors as ``contents``."""
    at = 0
    for data in contents(objects, file):
        sink.write_at(at, data)
        at += data.nbytes
        yield data.nbytes
    sink.truncate(at)


class ArtifactStore(Store):
    """An artifact of a library as the folder that was added, to be opened as any other; decoded as it is read.

    In memory are the objects that were touched last: 256 MiB of them, or one.

    Parameters
    ----------
    objects : Objects
    manifest : Manifest
    address : str
        Where it is found again.
    inside : str
        The folder of the artifact that the store is of.
    """

    def __init__(self, objects: Objects, manifest: Manifest, address: str, inside: str = "") -> None:
        self.objects, self.manifest = objects, manifest
        self._start = f"{inside}/" if inside else ""
        self._files = {
            file.name.removeprefix(self._start): file for file in manifest.files if file.name.startswith(self._start)
        }
        self.location = self.url = address
        self._held: OrderedDict[str, memoryview] = OrderedDict()
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
                "expected an existing file, found none", rule="store.missing", where=self.location_of(name)
            )
        return _FileSource(self, file, self.location_of(name))

    def values(self, piece: Piece) -> memoryview:
        """Return an object's bytes, those that were decoded lately without doing it again."""
        with self._lock:
            held = self._held.get(piece.object)
            if held is None:
                held = self._held[piece.object] = self.objects.values(piece.object, piece.size)
                while len(self._held) > 1 and sum(each.nbytes for each in self._held.values()) > _HELD:
                    self._held.popitem(last=False)
            else:
                self._held.move_to_end(piece.object)
            if held.nbytes != piece.size:
                raise FormatError("library.object", f"expected {piece.size} bytes, found {held.nbytes}")
            return held


class _FileSource:
    """One file, decoded where it is read."""

    mapped = False

    def __init__(self, store: ArtifactStore, file: File, name: str) -> None:
        self._store, self._file = store, file
        self.name, self.size = name, file.size
        self._starts = [0]
        for piece in file.pieces:
            self._starts.append(self._starts[-1] + piece.size)

    def view(self, offset: int, length: int) -> memoryview:
        require_inside(offset, length, self.size, self.name)
        out = memoryview(bytearray(length))
        self.readinto(offset, out)
        return out

    def readinto(self, offset: int, out: memoryview) -> None:
        require_inside(offset, out.nbytes, self.size, self.name)
        out = out.cast("B") if out.nbytes else out
        index = bisect_right(self._starts, offset) - 1
        while out.nbytes:
            piece, within = self._file.pieces[index], offset - self._starts[index]
            count = min(piece.size - within, out.nbytes)
            if count and piece.object:
                out[:count] = self._store.values(piece)[within : within + count]
            elif count:
                out[:count] = piece.data[within : within + count] if piece.data else bytes(count)
            out, offset, index = out[count:], offset + count, index + 1

    def changed(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing to do: what was decoded belongs to the store."""
