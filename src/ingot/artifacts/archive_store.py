"""The files of an archive as a store: they can be opened like any other files, and are decoded when they are read."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from urllib.parse import quote, unquote

import numpy as np

from ingot.artifacts.archive_layout import KEY, LAYOUT, MAX_LAYOUT, ArchivedFile, ArchiveLayout, content_size
from ingot.artifacts.archive_layout import parse_layout as parse
from ingot.codecs.delta.base import delta_codec
from ingot.codecs.delta.exact import ID as DELTA
from ingot.codecs.delta.exact_chunks import check_sizes, params_of, unpack
from ingot.codecs.table import CODECS
from ingot.core.bytes.checksums import Blake3, hex_of
from ingot.core.numeric.dtypes import DTYPES, file_bytes, from_file, numpy_dtype
from ingot.errors import FormatError, IngotError, IntegrityError, UnsupportedError, UsageError
from ingot.formats.base import Catalog
from ingot.formats.detect import FORMATS
from ingot.model.bytesource import ByteSource, JoinedSource, Stamp, StampedSource
from ingot.model.layouts.dense import DenseLayout
from ingot.model.reading.lazy import as_tensor_map
from ingot.model.reading.ranges import read_bytes
from ingot.model.store import Listing, Store, checked_name
from ingot.model.tensor import Tensor
from ingot.stores.location import Location
from ingot.stores.scheme import Scheme

SCHEME = "archive"
_MAX_CACHED = 128 << 20
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
BASE_DIGEST = "archive.base-digest"
_SMALL = 8 << 20
_CHUNK = 1 << 20


class ArchiveObjects:
    """The objects of an archive, whose contents are decoded on request.

    Parameters
    ----------
    layout : ArchiveLayout
    tensors : mapping of name to Tensor
        The tensors of the ``.zt`` file.
    location : str
        The archive, for error messages.
    source : ByteSource
        The open archive.
    """

    def __init__(self, layout: ArchiveLayout, tensors: Mapping[str, Tensor], location: str, source: ByteSource) -> None:
        self.layout = layout
        self.source = source
        self.location = location
        self._tensors = as_tensor_map(tensors)
        self._sizes = [content_size(spec) for spec in layout.objects]
        self._base: tuple[Store, str] | None = None
        self._neighbor: tuple[Store, str] | None = None
        self._base_files: dict[str, ByteSource] = {}
        self._checked: set[int] = set()
        self._cached: OrderedDict[int, memoryview] = OrderedDict()
        self._lock = threading.Lock()
        self._base_lock = threading.Lock()
        self.max_cached = _MAX_CACHED

    def use_base(self, store: Store, single: str) -> None:
        """Set the model that the archive refers to: a folder, or the file ``single``."""
        self._base = (store, single)
        self._base_files = {}

    def find_base_in_folder(self, outer: Store, name: str) -> None:
        """Set the folder in which the other model is searched: the folder of the archive ``name`` in ``outer``.

        The layout has the model's name. ``use_base`` replaces this setting. Ranges are compared with their digests
        before they are used.
        """
        folder, mark, _ = name.rpartition("/")
        self._neighbor = outer, f"{folder}{mark}{self.layout.against}"

    def require_base(self) -> tuple[Store, str]:
        """Return the model that the archive refers to: its store, and its name there if it is a single file.

        Raises ``UnsupportedError`` ``archive.base`` if it is neither set nor found.
        """
        if self._base is None:
            if self._neighbor is None or not self.layout.against or "/" in self.layout.against:
                raise self.base_error()
            outer, name = self._neighbor
            try:
                location = Location.in_store(outer, checked_name(name, self.location))
                self._base = find_base(location)
            except IngotError as error:
                raise self.base_error() from error
        return self._base

    def changed(self) -> bool:
        """Return whether the archive, or a file of its base that was read, was written to since it was opened."""
        return any(source.changed() for source in (self.source, *self._base_files.values()))

    def needs_base(self, file: ArchivedFile) -> bool:
        """Return whether a file contains ranges of another model, or differences to it."""
        return any(self._root(span.object) >= len(self._sizes) for span in file.spans)

    def _root(self, index: int) -> int:
        while index in self.layout.bases:  # bases precede their objects, or are external
            index = self.layout.bases[index]
        return index

    def base_error(self) -> UnsupportedError:
        """Return the error ``archive.base`` for access without the other model."""
        return UnsupportedError(
            f"the archive refers to another model, {self.layout.against[:200]!r}: put that model beside the archive, "
            f"or name it: --against MODEL of restore, or the address {SCHEME}:ARCHIVE!!MODEL",
            rule="archive.base",
            where=self.location,
        )

    def _read_external(self, index: int, offset: int, out: memoryview) -> None:
        """Fill ``out`` from an external range, whose digest is checked at the first access.

        Raises ``UnsupportedError`` ``archive.base`` if the other model is missing, and ``IntegrityError``
        ``archive.base-digest`` if its bytes differ.
        """
        item = self.layout.external[index - len(self._sizes)]
        with self._base_lock:
            store, single = self.require_base()
            source = self._base_files.get(item.file)
            if source is None:
                source = self._base_files[item.file] = _open_base_file(store, single or item.file)
        location = store.location_of(single or item.file)
        if item.offset + item.size > source.size:
            raise _another_base(location)
        if index not in self._checked:
            digest = Blake3()
            for start in range(0, item.size, _CHUNK):
                digest.update(read_bytes(source, item.offset + start, min(_CHUNK, item.size - start)))
            if hex_of(digest) != item.blake3:
                raise _another_base(location)
            self._checked.add(index)
        source.readinto(item.offset + offset, out)

    def _read_difference(self, index: int, tensor: Tensor, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the content of an object that is stored as a difference."""
        params = params_of(tensor)
        chunk = params.chunk * params.width
        total = tensor.size * params.width
        first = offset // chunk
        last = -(-(offset + out.nbytes) // chunk)
        sizes = tensor.parts["sizes"].array()
        check_sizes(params, sizes, tensor.size, tensor.parts["planes"].nbytes, tensor.name)
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
        planes = np.empty(int(ends[last] - ends[first]), np.uint8)
        tensor.parts["planes"].readinto(int(ends[first]), planes.data)
        raw = np.empty(min(last * chunk, total) - first * chunk, np.uint8)
        self.readinto(self.layout.bases[index], first * chunk, raw.data)
        row = DTYPES[tensor.dtype]
        values = from_file(raw, row.storage) if row.is_storage else raw.view(numpy_dtype(row.name))
        values = np.require(values, requirements=("W", "C"))
        unpack({"sizes": sizes[first:last], "planes": planes}, values, values, chunk=params.chunk)
        start = offset - first * chunk
        out[:] = file_bytes(values)[start : start + out.nbytes]

    def tensor(self, index: int) -> Tensor:
        """Return an object's tensor.

        Raises ``FormatError`` ``archive.object``: it differs from the layout, or Ingot cannot return its content.
        """
        spec = self.layout.objects[index]
        location = f"{self.location}: {spec.name[:200]}"
        if spec.name not in self._tensors:
            raise IntegrityError("archive.object", "the archive does not contain this object", where=location)
        tensor = self._tensors.get_uncached(spec.name)
        if (tensor.shape, tensor.dtype, tensor.codec) != (spec.shape, spec.dtype, spec.codec):
            raise FormatError("archive.object", "the object differs from the archive's layout", where=location)
        if len(tensor.parts) == 1:
            (part,) = tensor.parts.values()
            if part.nbytes != self._sizes[index]:
                raise FormatError("archive.object", "the object has another size than in the layout", where=location)
            return tensor
        if index in self.layout.bases:
            delta_codec(DELTA).check(tensor)
            return tensor
        codec = CODECS.get(tensor.codec)
        if codec is None or not codec.lossless or not codec.elementwise:
            message = f"expected a lossless codec that this version of Ingot reads, found {tensor.codec[:80]!r}"
            raise FormatError("archive.object", message, where=location)
        codec.check(tensor)
        tensor.decoder = codec
        return tensor

    def blobs(self) -> list[tuple[int, int]]:
        """Return offset and length of all parts in the archive's file, in file order.

        Raises ``FormatError`` ``archive.object`` if the file has other objects than the layout.
        """
        if len(self._tensors) != len(self._sizes) + 1:
            raise FormatError("archive.object", "the archive has objects that its layout lacks", where=self.location)
        return sorted((part.offset, part.length) for item in self._tensors.uncached() for part in item.parts.values())

    def ratio(self, index: int) -> float:
        """Return the stored bytes of an object as a share of its content. Raises the errors of ``tensor``."""
        return self.tensor(index).occupies / max(self._sizes[index] or 0, 1)

    def readinto(self, index: int, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the content of an object from ``offset``, after checking the digests of the bytes read."""
        if index >= len(self._sizes):
            self._read_external(index, offset, out)
            return
        tensor = self.tensor(index)
        if index in self.layout.bases:
            self._read_difference(index, tensor, offset, out)
            return
        if len(tensor.parts) > 1:
            _read_values(tensor, offset, out)
            return
        (part,) = tensor.parts.values()
        if part.encoding != "zstd":
            part.readinto(offset, out)
        elif part.nbytes > _SMALL and out.nbytes == part.nbytes:
            reader = part.reader()
            reader.readinto(out)
            reader.finish()
        else:
            out[:] = self._decompressed(index, tensor)[offset : offset + out.nbytes]

    def is_divisible(self, index: int) -> bool:
        """Return whether ranges of the object's content are decoded without the bytes before them."""
        if index >= len(self._sizes):
            return True
        spec = self.layout.objects[index]
        return len(spec.parts) > 1 or spec.parts[0].encoding != "zstd"

    def _decompressed(self, index: int, tensor: Tensor) -> memoryview:
        """Return the content of a compressed object, from the cache if it was read recently."""
        with self._lock:
            data = self._cached.get(index)
            if data is not None:
                self._cached.move_to_end(index)
                return data
        (part,) = tensor.parts.values()
        data = part.view()
        with self._lock:
            self._cached[index] = data
            while len(self._cached) > 1 and sum(item.nbytes for item in self._cached.values()) > self.max_cached:
                self._cached.popitem(last=False)
        return data


def find_base(location: Location, io: str = "pread") -> tuple[Store, str]:
    """Return the files of a model to which an archive refers, and the name of the file if the model is a single file.

    If ``location`` is itself an archive, these are the files in it. Raises the errors of ``Location.find_model`` and
    ``open_archive``.
    """
    store, name = location.find_model(io)
    opened = open_archive(store, name, alone=True) if name.lower().endswith(".zt") else None
    return (store, name) if opened is None else (opened[1], opened[1].only_file)


def _open_base_file(store: Store, name: str) -> ByteSource:
    """Open a file of the base. Raises ``IntegrityError`` ``archive.base-digest`` if the base lacks it."""
    if not store.exists(name):
        raise _another_base(store.location_of(name))
    return store.open(name)


def _another_base(location: str) -> IntegrityError:
    return IntegrityError(
        BASE_DIGEST, "the archive was made against another model than this one: name that one", where=location
    )


def _read_values(tensor: Tensor, offset: int, out: memoryview) -> None:
    """Fill ``out`` with little-endian bytes of a tensor's values, from the byte ``offset``."""
    dtype = numpy_dtype(tensor.dtype)
    if out.nbytes == tensor.size * dtype.itemsize:
        out[:] = file_bytes(tensor.numpy())
        return
    first = offset // dtype.itemsize
    last = -(-(offset + out.nbytes) // dtype.itemsize)
    values = replace(tensor, shape=(tensor.size,))[first:last]
    start = offset - first * dtype.itemsize
    out[:] = file_bytes(np.ascontiguousarray(values))[start : start + out.nbytes]


class ArchiveStore(Store):
    """The files of an archive as a folder; objects are decoded when they are read.

    Compressed objects that were used last stay in memory, up to 128 MiB, or one object if it is larger.

    Parameters
    ----------
    objects : ArchiveObjects
    address : str
        The address of this store.
    archive : Store, name : str
        The store that contains the archive, and the archive's name in it.
    inside : str
        The folder within the archive that this store shows; empty for the entire archive.
    base : str
        The address of the model that the archive refers to, as addresses in the archive state it; empty by default.
    """

    def __init__(
        self, objects: ArchiveObjects, address: str, archive: Store, name: str, inside: str = "", base: str = ""
    ) -> None:
        self.objects = objects
        self.layout = objects.layout
        self._archive = archive
        self._name = name
        self._start = f"{inside}/" if inside else ""
        self._files = {
            file.name.removeprefix(self._start): file
            for file in objects.layout.files
            if file.name.startswith(self._start)
        }
        self._address = address
        self._base = base
        self._suffix = f"!{base}" if base else ""
        self.url = f"{address}{self._suffix}" if address else ""
        self.location = objects.location + (f"!{inside}" if inside else "")

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
        return ArchivedSource(self.objects, file, self.location_of(name))

    @property
    def is_folder_inside(self) -> bool:
        """Whether this store shows a folder in the archive instead of the entire archive."""
        return bool(self._start)

    @property
    def only_file(self) -> str:
        """The name of the archived file if the archive is no folder; else empty."""
        return "" if self.layout.folder else self.layout.files[0].name

    def inside(self, folder: str) -> ArchiveStore:
        """Return a folder of the archive as a store."""
        address = f"{self._address}{quote(folder)}"
        return ArchiveStore(self.objects, address, self._archive, self._name, folder, self._base)

    def with_base(self, base: str, io: str) -> ArchiveStore:
        """Return the same files, read with the model at the address ``base``. Raises the errors of ``find_base``."""
        self.objects.use_base(*find_base(Location.parse(base.replace("%21", "!")), io))
        return ArchiveStore(self.objects, self._address, self._archive, self._name, base=base)

    def location_of(self, name: str = "") -> str:
        """Return the archive's location, an exclamation mark, and the name of the file in the archive."""
        return f"{self.objects.location}!{self._start}{name}" if name or self._start else self.objects.location

    def url_of(self, name: str = "") -> str:
        mark = "/" if self._start and name else ""
        return f"{self._address}{mark}{quote(name)}{self._suffix}" if self._address else ""

    def would_overwrite(self, names: Iterable[str], target: str, *, folder: bool) -> bool:
        return self._archive.would_overwrite([self._name], target, folder=folder)


class ArchivedSource(JoinedSource, StampedSource):
    """A byte source of a file of an archive; its stamp is that of the archive."""

    def __init__(self, objects: ArchiveObjects, file: ArchivedFile, name: str) -> None:
        super().__init__((span.size for span in file.spans), name)
        self._objects = objects
        self._spans = file.spans
        source = objects.source
        stamp = source.stamp if isinstance(source, StampedSource) else Stamp(source.size)
        self.stamp = stamp._replace(size=file.size)

    def read_span(self, index: int, offset: int, out: memoryview) -> None:
        """Decode bytes of the object of a span."""
        span = self._spans[index]
        self._objects.readinto(span.object, span.offset + offset, out)

    def changed(self) -> bool:
        """Return whether the archive was written to since it was opened."""
        return self._objects.changed()

    def close(self) -> None:
        """Do nothing: other files of the archive may be in use. The archive is closed when no file refers to it."""


class ArchiveScheme(Scheme):
    """The scheme ``archive:`` for addresses of files and folders in archives.

    ``archive:ADDRESS!`` is the archive at a path or address, ``archive:ADDRESS!NAME`` a file or folder in it. With
    ``!BASE`` at the end, it is read with the model at the path or address ``BASE``. In ``ADDRESS`` and ``BASE``, ``!``
    is written ``%21``.
    """

    def store(self, text: str, io: str) -> Store:
        store, name = self.locate(text, io)
        if name:
            raise UsageError("expected a folder", rule="store.not-a-folder", where=text)
        return store

    def locate(self, text: str, io: str) -> tuple[Store, str]:
        """Return the archive's files, or a folder of them, as a store, and the name of the file that the address names.

        If it names no file, the name is that of the only file if the archive is no folder, else empty.
        """
        address, mark, inner = text.partition(":")[2].partition("!")
        path, _, base = inner.partition("!")
        if not address or not mark:
            raise UsageError(
                "expected archive:ADDRESS!, archive:ADDRESS!NAME or archive:ADDRESS!NAME!BASE",
                rule="store.url",
                where=text,
            )
        outer, name = Location.parse(address.replace("%21", "!")).find_file(io)
        opened = open_archive(outer, name)
        if opened is None:
            raise UsageError(
                "expected an archive of `ingot archive`", rule="archive.none", where=outer.location_of(name)
            )
        store = opened[1].with_base(base, io) if base else opened[1]
        inside = unquote(path).strip("/")
        if not inside:
            return store, store.only_file
        files = [file.name for file in store.layout.files]
        if inside in files:
            return store, inside
        if any(file.startswith(f"{inside}/") for file in files):
            return store.inside(inside), ""
        raise UsageError("expected an existing file, but there is none", rule="store.missing", where=text)


def archive_store(catalog: Catalog, store: Store, name: str, *, alone: bool = False) -> ArchiveStore:
    """Return the files of the archive ``name`` in ``store``, whose manifest is ``catalog``.

    If the archive refers to another model, that model is searched in the archive's folder. With ``alone``, it is not,
    so that archives cannot refer to each other in a circle.

    Raises ``FormatError`` and ``IntegrityError`` ``archive.*`` if the layout is missing, damaged or invalid.
    """
    location = store.location_of(name)
    layout = read_layout(catalog, location)
    objects = ArchiveObjects(layout, catalog.tensors, location, catalog.sources[0])
    if layout.external and not alone:
        objects.find_base_in_folder(store, name)
    address = store.url_of(name)
    url = f"{SCHEME}:{address.replace('!', '%21')}!" if address else ""
    return ArchiveStore(objects, url, store, name)


def read_layout(catalog: Catalog, location: str) -> ArchiveLayout:
    """Return the layout of an archive. Raises the errors of ``archive_store``."""
    if not catalog.manifest_digest:
        message = "the archive's manifest has no digest, so damage could go unseen: the file is damaged"
        raise IntegrityError("archive.no-digest", message, where=location)
    tensor = catalog.tensors.get(LAYOUT)
    if catalog.metadata.get(KEY) != LAYOUT or tensor is None or tensor.codec != DenseLayout.codec:
        raise FormatError("archive.layout", f"expected the layout as the object {LAYOUT!r}", where=location)
    part = tensor.parts["data"]
    if part.nbytes > MAX_LAYOUT:
        raise FormatError("archive.layout", f"expected a layout of at most {MAX_LAYOUT} bytes", where=location)
    size = sum(source.size for source in catalog.sources)
    return parse(bytes(part.view()), size, location)


def open_archive(store: Store, name: str, *, alone: bool = False) -> tuple[Catalog, ArchiveStore] | None:
    """Return the catalog and the files of an archive, or None if the file is no archive.

    ``archive_store`` describes ``alone``. Raises the errors of reading a ``.zt`` file, and those of ``archive_store``.
    """
    from ingot.formats.zt.manifest import ALIGNMENT, MAGIC

    head = store.head(name, ALIGNMENT + len(_ZSTD_MAGIC))
    if head[: len(MAGIC)] != MAGIC or head[ALIGNMENT:] != _ZSTD_MAGIC:  # the layout is the first object
        return None
    catalog = FORMATS["zt"].read(store, name, verify=True)
    try:
        return (catalog, archive_store(catalog, store, name, alone=alone)) if KEY in catalog.metadata else None
    except IngotError:
        for source in catalog.sources:
            source.close()
        raise
