"""Read and write a folder of ``.npy`` files, one dense array per tensor: squish's finalized cache (Squish
Architecture, section 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ingot.core.numeric.dtypes import DTYPES
from ingot.errors import FormatError, IntegrityError, UnsupportedError
from ingot.ext.squish.npydir import npy
from ingot.ext.squish.npydir.array_file import ArrayFile
from ingot.ext.squish.npydir.arrays import open_array
from ingot.ext.squish.npydir.names import ARRAYS_READY, FINALIZED, MANIFEST, why_name_unsupported
from ingot.formats.base import Catalog, Format, FormatTraits, FormatWriter, WriteOptions
from ingot.formats.shared.order import Order
from ingot.model.artifact import Artifact
from ingot.model.bytesource import Buffer, Target
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.part import Part
from ingot.model.spec import TensorSpec
from ingot.model.store import Store
from ingot.model.tensor import Tensor

SUFFIX = ".npy"


class NpyFormat(Format):
    """Format of dense tensors stored as ``{name}.npy``; it also reads names in which squish replaced dots with
    underscores."""

    name = "npy"
    suffixes: tuple[str, ...] = ()
    summary = "a folder of dense .npy files, one per tensor: squish's finalized cache"
    traits = FormatTraits(
        folder=True,
    )

    def claims(self, name: str, head: bytes) -> bool:
        """Return False: a single array is not a checkpoint."""
        return False

    def entry(self, names: Sequence[str]) -> str | None:
        """Return the first array if the folder has arrays and no manifest; otherwise None."""
        return None if MANIFEST in names else next(iter(sorted(_arrays(names))), None)

    def has_sentinel(self, store: Store) -> bool:
        """Return whether squish's sentinel ``.ready`` exists."""
        return store.exists(ARRAYS_READY)

    def fallback_entry(self, names: Sequence[str], store: Store) -> str | None:
        """Return the path of the sentinel of a Squish directory's finalized arrays; None if it does not exist."""
        entry = f"{FINALIZED}/{ARRAYS_READY}"
        return entry if f"{FINALIZED}/" in names and store.exists(entry) else None

    def why_unsupported(self, spec: TensorSpec) -> str | None:
        """Return the reason why a folder of arrays cannot store the tensor; None if it can."""
        if spec.codec != DenseLayout.codec:
            return f"a .npy file stores dense values only, found codec {spec.codec}"
        if any(part.encoding != "raw" for part in spec.parts):
            return "a .npy file stores values uncompressed, and this tensor has compressed parts"
        if spec.dtype not in npy.CODE_OF:
            return f"a .npy file cannot have the element type {spec.dtype}; it supports {', '.join(npy.CODE_OF)}"
        if not spec.name or spec.name.startswith("."):
            return f"a file whose name begins with a dot is hidden and is not read back: {spec.name[:80]!r}"
        return why_name_unsupported(spec.name)

    def order(self, specs: Sequence[TensorSpec]) -> Sequence[int]:
        """Return the order of ``specs`` unchanged, because the format stores tensors in any order.

        Raises ``UnsupportedError`` ``npydir.collision`` if reading the folder would give a tensor another name.
        """
        files = [spec.name + SUFFIX for spec in specs]
        for spec, back in zip(specs, _tensor_names(files), strict=True):
            if spec.name != back:
                raise UnsupportedError(
                    f"{spec.name!r} would be read back as {back!r}, because no name has a dot: choose another format",
                    rule="npydir.collision",
                    where=spec.name,
                )
        return range(len(specs))

    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Read the header of every array in the folder of ``name``; return the tensors. The format has no digests to
        verify.

        Raises ``FormatError`` with the rules of spec/npydir.md, among them ``npydir.link`` and
        ``npydir.manifest-collision``.
        """
        folder = name.rpartition("/")[0]
        listing = store.list(folder)
        files = _arrays(listing.files)
        links = _arrays(listing.outside)
        if links:
            raise FormatError(
                "npydir.link",
                "expected files in this folder, found a link that points out of it: copy the folder with `cp -rL`",
                where=links[0],
            )
        tensors = {}
        headers = {}
        sources = []
        try:
            for key, file in zip(_tensor_names(files), (f"{folder}/{file}".lstrip("/") for file in files), strict=True):
                array = open_array(store, file)
                headers[file] = array.head
                sources.append(array.source)
                header = array.header
                row = DTYPES[header.dtype]
                part = Part(
                    row.storage,
                    header.nbytes,
                    array.source,
                    header.offset,
                    type=None if row.is_storage else row.name,
                    where=f"{file}: data",
                )
                tensors[key] = Tensor(key, header.shape, header.dtype, DenseLayout.codec, {DATA: part})
        except BaseException:
            for source in sources:
                source.close()
            raise
        if len(tensors) != len(files):
            raise FormatError(
                "npydir.manifest-collision", "expected one file per tensor, found two: remove one", where=files[0]
            )
        return Catalog(tensors, headers=headers, sources=tuple(sources))

    def metadata(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an empty mapping: arrays cannot store metadata."""
        return {}

    def file_name(self, stem: str) -> str:
        """Return the name of the array file."""
        return stem + SUFFIX

    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        """Return the exact total size of all files in bytes."""
        return sum(len(npy.encode(spec.dtype, spec.shape)) + spec.parts[0].at_most for spec in artifact.tensors)

    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> NpyWriter:
        """Return a writer of one ``.npy`` file per tensor.

        Raises ``UnsupportedError`` ``npydir.carry`` for a tensor that the format cannot store.
        """
        for spec in artifact.tensors:
            reason = self.why_unsupported(spec)
            if reason is not None:
                raise UnsupportedError(reason, rule="npydir.carry", where=spec.name)
        return NpyWriter(target, artifact.tensors)


class NpyWriter(FormatWriter):
    """Writer of one ``.npy`` file per tensor."""

    def __init__(self, target: Target, specs: Sequence[TensorSpec]) -> None:
        self._target = target
        self._order = Order(specs)
        self._done: list[str] = []
        self._open: ArrayFile | None = None

    def begin(self, spec: TensorSpec) -> None:
        """Start the next tensor of the specs; create its file."""
        self._order.begin(spec)
        path = spec.name + SUFFIX
        self._open = ArrayFile(self._target.create(path), path, spec.dtype, spec.shape)

    def write(self, role: str, data: Buffer) -> None:
        """Append bytes of the tensor's values."""
        self._order.write(role, memoryview(data).nbytes)
        assert self._open is not None
        self._open.write(data)

    def end(self) -> dict[str, Any]:
        """Close the tensor's file; return its record with ``name`` and ``blobs``."""
        name = self._order.end().name
        assert self._open is not None
        blob = self._open.close()
        self._open = None
        self._done.append(blob[0])
        return {"name": name, "blobs": [blob]}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Accept a tensor that an earlier run wrote.

        Raises ``IntegrityError`` ``writer.record`` if the record does not match the specs.
        """
        spec = self._order.expect(record["name"])
        path = spec.name + SUFFIX
        expected_blob = [path, len(npy.encode(spec.dtype, spec.shape)), _nbytes(spec)]
        if [list(blob)[:3] for blob in record["blobs"]] != [expected_blob]:
            raise IntegrityError(
                "writer.record", "the earlier run wrote the files with a different layout: start again", where=spec.name
            )
        self._order.restored(spec.name)
        self._done.append(path)

    def finish(self) -> list[str]:
        """Return the names of all files."""
        self._order.finish()
        return list(self._done)

    def abort(self) -> None:
        """Close the open file without completing it."""
        if self._open is not None:
            self._open.abort()
            self._open = None


def _nbytes(spec: TensorSpec) -> int:
    return prod(spec.shape) * DTYPES[spec.dtype].bits // 8


def _arrays(names: Sequence[str]) -> list[str]:
    return [name for name in names if name.endswith(SUFFIX) and not name.startswith(".")]


def _tensor_names(files: Sequence[str]) -> list[str]:
    """Return the tensor names for the names of array files.

    squish's code writes ``a__b.npy`` where its document specifies ``a.b.npy``.
    """
    stems = [name.removesuffix(SUFFIX) for name in files]
    are_safe_keys = any("__" in stem for stem in stems) and not any("." in stem for stem in stems)
    return [stem.replace("__", ".") for stem in stems] if are_safe_keys else stems
