"""Where tensors lie in an artifact's files: what a library keeps as objects, and what is left between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ingot.core.numeric.dtypes import DTYPES
from ingot.errors import IngotError
from ingot.formats.base import Format
from ingot.formats.detect import detect_file, detect_folder, listing
from ingot.formats.shared.foreign import HEAD
from ingot.library.encode import element_type
from ingot.library.manifest import INLINE
from ingot.library.tree import files_in
from ingot.model.bytesource import ByteSource
from ingot.model.layouts.dense import DenseLayout
from ingot.model.store import Listed, Listing, Store
from ingot.model.tensor import Tensor

BLOCK = 16 << 20
"""Bytes of the pieces of what is no tensor."""

_LEFT_OUT = (".git", ".cache", ".huggingface")
_PARTIAL = ".ingot-partial"


@dataclass(frozen=True, slots=True)
class Segment:
    """Some bytes of a file. ``tensor`` is empty where they are no tensor's."""

    start: int
    size: int
    tensor: str = ""
    part: str = ""
    dtype: str = "u8"
    shape: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What the same tensor of another version of the model has too."""
        return self.tensor, self.part, self.dtype, self.size


def files_of(store: Store) -> Iterator[str]:
    """Yield the files of an artifact's folder, at any depth; errors as ``files_in``.

    Hidden ones belong to it (some formats have sentinels), but for the folders of git and of download tools, and what
    an interrupted run of Ingot left. Links out of the folder do not.
    """

    def belongs(listing: Listing, name: str) -> bool:
        is_left = name in listing.folders and (name in _LEFT_OUT or name.endswith(_PARTIAL))
        return not is_left and name not in listing.outside

    return files_in(store, "", belongs)


def segments(store: Store, names: Iterable[str], *, folder: bool) -> dict[str, list[Segment]]:
    """Return for each file the tensors' parts that lie in it as they are, in order, without those that overlap.

    Files of formats that Ingot reads are opened one by one; then, for formats of several files, the folder. What cannot
    be opened has no tensors: it is kept all the same, in blocks.
    """
    known = list(names)
    found: dict[str, list[Segment]] = {name: [] for name in known}
    for name in known:
        _locate(store, name, found)
    if folder and any(not found[name] for name in known):
        _locate(store, "", found)
    return {name: _apart(each) for name, each in found.items()}


def _locate(store: Store, name: str, found: Mapping[str, list[Segment]]) -> None:
    """Add the parts that a catalog tells of files without any: a file's, or the folder's where ``name`` is empty."""
    opened, empty = _Opened(store), {other for other in found if not found[other]}
    try:
        format, entry = _detected(opened, name)
        if format.traits.last_resort:
            return
        catalog = format.read(opened, entry, verify=False)
    except IngotError:
        return  # no checkpoint, or a damaged one
    try:
        for tensor in catalog.tensors.values():
            for role in tensor.parts:
                file = opened.name_of(tensor.parts[role].source)
                if file in empty:
                    found[file].append(_segment(tensor, role))
    except IngotError:
        return
    finally:
        for source in catalog.sources:
            source.close()


def _detected(store: Store, name: str) -> tuple[Format, str]:
    if not name:
        return detect_folder(listing(store), store)
    return detect_file(name, store.head(name, HEAD)), name


def _segment(tensor: Tensor, role: str) -> Segment:
    part = tensor.parts[role]
    if part.encoding != "raw":
        return Segment(part.offset, part.length, tensor.name, role, "u8", (part.length,))
    plain = tensor.codec == DenseLayout.codec and tensor.dtype in DTYPES
    dtype = element_type(tensor.dtype if plain else part.dtype)
    width = DTYPES[dtype].bits // 8
    if plain and DTYPES[tensor.dtype].nbytes(tensor.size) == part.length and dtype == tensor.dtype:
        return Segment(part.offset, part.length, tensor.name, role, dtype, tensor.shape)
    if part.length % width:
        dtype, width = "u8", 1
    return Segment(part.offset, part.length, tensor.name, role, dtype, (part.length // width,))


def _apart(parts: list[Segment]) -> list[Segment]:
    kept: list[Segment] = []
    end = 0
    for part in sorted(parts, key=lambda item: (item.start, -item.size)):
        if part.start >= end and part.size > INLINE:
            kept.append(part)
            end = part.start + part.size
    return kept


def covered(parts: Iterable[Segment], size: int) -> Iterator[Segment]:
    """Yield segments that are a whole file of so many bytes: its parts, and blocks of what lies between them."""
    end = 0
    for part in (*parts, Segment(size, 0)):
        if part.start + part.size > size:
            continue  # a header that promises more than there is
        for start in range(end, part.start, BLOCK):
            yield Segment(start, min(BLOCK, part.start - start))
        if part.size:
            yield part
        end = part.start + part.size


class _Opened(Store):
    """A store that remembers which of its files a source is of."""

    def __init__(self, store: Store) -> None:
        self._store = Listed(store)
        self._sources: list[tuple[ByteSource, str]] = []
        self.location, self.url = store.location, store.url

    def list(self, folder: str = "") -> Listing:
        return self._store.list(folder)

    def open(self, name: str) -> ByteSource:
        source = self._store.open(name)
        self._sources.append((source, name))
        return source

    def name_of(self, source: ByteSource) -> str | None:
        return next((name for known, name in self._sources if known is source), None)
