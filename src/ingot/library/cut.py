"""Segments of an artifact's files: tensor parts, which a library stores as objects, and the bytes between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ingot.core.numeric.dtypes import DTYPES
from ingot.errors import IngotError
from ingot.formats.base import Format
from ingot.formats.detect import HEAD, detect_file, detect_folder, listing
from ingot.formats.torch.inert_pickle import Name, Record, Reference
from ingot.formats.torch.saved_tensors import SavedFile
from ingot.library.encode import element_type
from ingot.library.manifest import INLINE
from ingot.library.tree import files_in
from ingot.model.bytesource import ByteSource
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.store import CachedStore, Listing, Store
from ingot.model.tensor import Tensor

BLOCK = 16 << 20
"""Size in bytes of the blocks between tensors."""

IGNORED = (".git", ".cache", ".huggingface")
"""Folders of git and of download tools, which are not part of an artifact."""
_PARTIAL = ".ingot-partial"
_SAVED = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of bytes in a file and the tensor part in it; ``tensor`` is empty for other bytes.

    ``stored`` is the tensor, if this part is its only one.
    """

    start: int
    size: int
    tensor: str = ""
    part: str = ""
    dtype: str = "u8"
    shape: tuple[int, ...] = ()
    stored: Tensor | None = field(default=None, repr=False, compare=False)

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Tensor name, part, dtype and size: segments with equal keys are versions of one tensor part."""
        return self.tensor, self.part, self.dtype, self.size


def files_of(store: Store, *, outside: bool = False) -> Iterator[str]:
    """Yield the files of an artifact's folder, at any depth. Raises the errors of ``files_in``.

    Hidden files are included, because some formats have sentinels. Files in folders of git and of download tools, and
    of interrupted runs of Ingot, are left out. Links out of the folder are included if ``outside`` is set.
    """

    def belongs(listing: Listing, name: str) -> bool:
        is_left = name in listing.folders and (name in IGNORED or name.endswith(_PARTIAL))
        return not is_left and (outside or name not in listing.outside)

    return files_in(store, "", belongs)


def segments(store: Store, names: Iterable[str], *, folder: bool) -> dict[str, list[Segment]]:
    """Return for each file the raw parts of tensors in it, in order, without overlaps.

    Each file of a supported format is opened separately, then the folder, for formats of several files. A file that
    cannot be opened has no tensors, and is stored in blocks.
    """
    files = list(names)
    by_file: dict[str, list[Segment]] = {name: [] for name in files}
    for name in files:
        _locate(store, name, by_file)
    if folder and any(not by_file[name] for name in files):
        _locate(store, "", by_file)
    return {name: _without_overlaps(parts) for name, parts in by_file.items()}


def _locate(store: Store, name: str, by_file: Mapping[str, list[Segment]]) -> None:
    """Add tensor parts to the files of ``by_file`` that have none, by opening the file ``name``.

    If ``name`` is empty, the folder is opened. Nothing is added if it is no checkpoint.
    """
    if name and name.lower().endswith(_SAVED):
        by_file[name].extend(_saved_by_torch(store, name))
        return
    opened = _Opened(store)
    empty = {file for file in by_file if not by_file[file]}
    try:
        format, entry = _detected(opened, name)
        if format.traits.last_resort:
            return
        catalog = format.read(opened, entry, verify=False)
    except IngotError:
        return  # not a checkpoint, or damaged
    try:
        for tensor in catalog.tensors.values():
            for role in tensor.parts:
                file = opened.name_of(tensor.parts[role].source)
                if file in empty:
                    segment = _segment(tensor, role)
                    if len(tensor.parts) == 1 and tensor.parts[role].encoding == "raw":
                        segment = replace(segment, stored=tensor)
                    by_file[file].append(segment)
    except IngotError:
        return
    finally:
        for source in catalog.sources:
            source.close()


def _saved_by_torch(store: Store, name: str) -> list[Segment]:
    """Return the tensors in a file of ``torch.save``, at any depth of dicts and lists; none in files of other programs.

    Training states are included. No class of the pickle is imported.
    """
    source = store.open(name)
    segments = []
    try:
        file = SavedFile(source, name)
        for path, value in _values(file.content):
            tensor = file.tensor(value, path)
            if tensor is not None and tensor.is_contiguous:
                size = prod(tensor.shape) * tensor.itemsize
                dtype = element_type(tensor.dtype.name)
                shape = tensor.shape if dtype == tensor.dtype.name else (size,)
                start = tensor.start + tensor.first * tensor.itemsize
                segments.append(Segment(start, size, path or name, DATA, dtype, shape))
    except IngotError:
        return segments  # a file of another program, or damaged
    finally:
        source.close()
    return segments


def _values(content: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values in nested dicts, lists and states of objects, with the keys that lead to them."""
    waiting = [("", content)]
    seen = set[int]()
    while waiting:
        path, value = waiting.pop()
        items: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, dict):
            items = value.items()
        elif isinstance(value, list | tuple) and not isinstance(value, Name | Reference):
            items = enumerate(value)
        elif isinstance(value, Record):
            yield path, value
            items = [*value.items, *enumerate(value.elements), *([("", value.state)] if value.state else [])]
        if id(value) not in seen:
            seen.add(id(value))  # a pickle may contain a container that contains itself
            waiting += reversed([(".".join(filter(None, (path, str(key)[:200]))), item) for key, item in items])


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
        dtype = "u8"
        width = 1
    return Segment(part.offset, part.length, tensor.name, role, dtype, (part.length // width,))


def _without_overlaps(parts: list[Segment]) -> list[Segment]:
    selected: list[Segment] = []
    end = 0
    for part in sorted(parts, key=lambda item: (item.start, -item.size)):
        if part.start >= end and part.size > INLINE:
            selected.append(part)
            end = part.start + part.size
    return selected


def covered(parts: Iterable[Segment], size: int) -> Iterator[Segment]:
    """Yield segments that cover a file of ``size`` bytes: the parts, and blocks of the bytes between them."""
    end = 0
    for part in (*parts, Segment(size, 0)):
        if part.start + part.size > size:
            continue  # beyond the end of the file: the header is wrong
        for start in range(end, part.start, BLOCK):
            yield Segment(start, min(BLOCK, part.start - start))
        if part.size:
            yield part
        end = part.start + part.size


class _Opened(Store):
    """A store that records the name of each source that it opens."""

    def __init__(self, store: Store) -> None:
        self._store = CachedStore(store)
        self._sources: list[tuple[ByteSource, str]] = []
        self.location = store.location
        self.url = store.url

    def list(self, folder: str = "") -> Listing:
        return self._store.list(folder)

    def open(self, name: str) -> ByteSource:
        source = self._store.open(name)
        self._sources.append((source, name))
        return source

    def name_of(self, source: ByteSource) -> str | None:
        return next((name for opened, name in self._sources if opened is source), None)
