"""Inspect a checkpoint by its headers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ingot.artifacts.open import Source, find, open_source_in_store
from ingot.artifacts.remarks import remarks
from ingot.errors import UnsupportedError, UsageError
from ingot.inspect.archive import ArchiveInfo, describe_archive
from ingot.inspect.receipt import receipt_of
from ingot.model.stacks import STACK_SELECTORS
from ingot.model.store import Store
from ingot.naming.names import layer_of, role_of
from ingot.reporting.report import Bytes, Shape, Table, Texts
from ingot.stores.location import AnyPath, Location


@dataclass(frozen=True, slots=True)
class PartInfo:
    """The description of a part: types, encoding, sizes in bytes, digest, file and offset."""

    role: str
    dtype: str
    type: str | None
    encoding: str
    length: Bytes
    nbytes: Bytes
    digest: str | None
    file: str
    offset: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The description of a tensor.

    ``nbytes`` is its number of bytes in the file; ``layer`` and ``role`` follow from the name.
    """

    name: str
    shape: Shape
    dtype: str
    codec: str
    nbytes: Bytes
    layer: int | None
    role: str
    params: Mapping[str, Any]
    parts: Sequence[PartInfo]

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Inspection:
    """The description of a checkpoint: sizes in bytes, every tensor, totals, and notes.

    ``receipt`` are the measurements in its receipt. ``archive`` describes the archive that contains the checkpoint,
    else None. If the archive contains no model or several models, ``tensors`` is empty.
    """

    path: str
    format: str
    io: str
    file_size: Bytes
    files: Texts
    metadata: Mapping[str, Any]
    companions: Texts
    tensors: Sequence[TensorInfo]
    details: Sequence[Table] = ()
    notes: Texts = ()
    receipt: Sequence[Mapping[str, Any]] = ()
    archive: ArchiveInfo | None = None

    @property
    def elements(self) -> int:
        return sum(tensor.size for tensor in self.tensors)

    @property
    def nbytes(self) -> Bytes:
        """The stored bytes of all parts of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def totals(self, key: str) -> dict[str, tuple[int, int, int]]:
        """Return totals for each value of a tensor's attribute ``key``: the numbers of tensors, elements and stored
        bytes.

        ``key`` is ``codec``, ``dtype``, ``role`` or ``layer``.
        """
        count: Counter[str] = Counter()
        elements: Counter[str] = Counter()
        nbytes: Counter[str] = Counter()
        for tensor in self.tensors:
            value = getattr(tensor, key)
            label = "-" if value is None else str(value)
            count[label] += 1
            elements[label] += tensor.size
            nbytes[label] += tensor.nbytes
        return {label: (count[label], elements[label], nbytes[label]) for label in count}


def inspect(path: AnyPath) -> Inspection:
    """Open ``path`` and describe it without reading tensors; raise the errors of ``ingot.open``."""
    return inspect_found(*find(Location.parse(path)))


def inspect_found(store: Store, name: str) -> Inspection:
    """Open and describe the file ``name`` of a store, or the folder if ``name`` is empty, as ``inspect`` does."""
    archive = describe_archive(store)
    try:
        source = open_source_in_store(store, name)
    except (UsageError, UnsupportedError) as error:
        if archive is None or not (error.rule or "").startswith(("detect.", "archive.")):
            raise
        return _without_model(store.location, archive, error.message)
    try:
        checkpoint = source.view()
        files = sorted(source.catalog.headers)
        receipt, fault = receipt_of(source)
        return Inspection(
            path=source.location,
            format=source.format.name,
            io=source.io,
            file_size=source.stored(),
            files=files,
            metadata=checkpoint.metadata,
            companions=sorted(checkpoint.companions),
            tensors=[_describe(name, checkpoint[name]) for name in checkpoint],
            details=[*source.catalog.details(), *_stacks(source)],
            notes=[*(message for _, message in remarks(source)), *([] if fault is None else [fault[1]])],
            receipt=[] if receipt is None else receipt.entries,
            archive=archive,
        )
    finally:
        source.close()


def _without_model(path: str, archive: ArchiveInfo, note: str) -> Inspection:
    """Return the description of an archive that cannot be opened as a model; ``note`` is the reason."""
    return Inspection(
        path=path,
        format="archive",
        io="pread",
        file_size=archive.stored,
        files=[file.name for file in archive.files],
        metadata={},
        companions=[],
        tensors=[],
        notes=[note],
        archive=archive,
    )


def _stacks(source: Source) -> Sequence[Table]:
    """Return a table of the kernel stacks that support the file's features; empty if its format has none."""
    features = source.catalog.features
    format = source.format.name
    return () if features is None or format not in STACK_SELECTORS else STACK_SELECTORS[format].tables(features)


def _describe(name: str, tensor: Any) -> TensorInfo:
    parts = [
        PartInfo(
            role,
            part.dtype,
            part.type,
            part.encoding,
            part.length,
            part.nbytes,
            part.digest,
            part.source.name.rpartition("/")[2],
            part.offset,
        )
        for role, part in tensor.parts.items()
    ]
    return TensorInfo(
        name,
        tensor.shape,
        tensor.dtype,
        tensor.codec,
        tensor.occupies,
        layer_of(name),
        role_of(name),
        dict(tensor.params),
        parts,
    )
