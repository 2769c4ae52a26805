"""The rules of a manifest beyond its schema: types, sizes, offsets. The checks read no bytes of tensors.

Rules and their reasons are in ``spec/zt.md``. For codecs other than zTensor's four, only the parts are checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NoReturn

import numpy as np

from ingot.core.bytes import checksums, packed
from ingot.core.bytes.chunk_digests import ChunkDigests, read_chunks
from ingot.core.bytes.packed import PACKED
from ingot.core.numeric.dtypes import DTYPES, MAX_RANK, STORAGE_DTYPES, element_count
from ingot.core.parsing.columns import Array
from ingot.errors import FormatError
from ingot.formats.shared.manifests import label
from ingot.formats.zt.manifest import ALIGNMENT, Component, Object
from ingot.model.layouts.affine import ROLES, AffineLayout
from ingot.model.layouts.base import file_id
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.layouts.sparse import CooLayout, CsrLayout

ITEM_BYTES = {name: row.bits // 8 for name, row in STORAGE_DTYPES.items()}
# RFC 8878 section 3.1.1.2: a block takes at least 4 bytes (3 of header, 1 of content) and gives at most 128 KiB.
MAX_ZSTD_RATIO = (128 << 10) // 4
MAX_DECODED = 1 << 47
REQUIRED_PARTS = {
    DenseLayout.codec: (DATA,),
    CsrLayout.codec: ("values", "indices", "indptr"),
    CooLayout.codec: ("values", "coords"),
    file_id(AffineLayout.codec): ROLES[:2],
}
_INDEX_PARTS = ("indices", "indptr", "coords")
_DIGEST = re.compile(r"crc32c:0x[0-9a-fA-F]{8}|sha256:[0-9a-fA-F]{64}").fullmatch

Sizes = dict[str, int | None]
Refuse = Callable[[str, str], NoReturn]


def check_objects(file: str, objects: Mapping[str, Object]) -> None:
    """Check every tensor with ``check_object``, except those that ``is_simple_object`` accepts.

    A manifest may contain 100,000 tensors, and most need no more than this short check.
    """
    for name, obj in objects.items():
        if not is_simple_object(obj):
            check_object(file, name, obj)


def is_simple_object(obj: Object) -> bool:
    """Return whether ``obj`` is a valid dense tensor in one raw part without a logical type."""
    part = obj.components.get("data")
    return (
        part is not None
        and obj.format == DenseLayout.codec
        and part.encoding == "raw"
        and part.type is None
        and part.uncompressed_length is None
        and 0 < part.length == prod(obj.shape) * ITEM_BYTES.get(part.dtype, 0)
        and len(obj.components) == 1
        and len(obj.shape) <= MAX_RANK
        and (part.digest is None or _DIGEST(part.digest) is not None)
        and part.ingot_chunks is None
    )


def check_object(file: str, name: str, obj: Object) -> None:
    """Check the shape, the types of the parts and, if they are defined, the sizes of a tensor.

    Raises
    ------
    FormatError
        ``zt.shape``, ``zt.part-missing``, and the rules of ``check_part`` and of the sizes of sparse parts.
    """
    count = prod(obj.shape)
    if not 0 < count < 2**63 or len(obj.shape) > MAX_RANK:
        count = element_count(obj.shape, "zt.shape", label(file, name))
    sizes: Sizes = {role: check_part(file, name, role, part) for role, part in obj.components.items()}
    for role in REQUIRED_PARTS.get(obj.format, ()):
        if role not in sizes:
            raise FormatError(
                "zt.part-missing",
                f"expected a part {role!r} in a {obj.format} tensor, but it is missing",
                where=label(file, name),
            )
    if obj.format == DenseLayout.codec:
        _check_dense(file, name, obj, count, sizes["data"])
    elif obj.format in (CsrLayout.codec, CooLayout.codec):
        _check_sparse(file, name, obj, sizes)


def check_part(file: str, name: str, role: str, part: Component) -> int | None:
    """Check types, encoding and digest of a part, and return the part's decoded size in bytes.

    Return None if the size depends on the stored bytes.

    Raises
    ------
    FormatError
        ``zt.dtype-unknown``, ``zt.type-storage``, ``zt.uncompressed-length``, ``zt.uncompressed-length-missing``,
        ``zt.zstd-ratio``, ``zt.packed-ratio``, ``zt.part-size``, ``zt.digest-syntax``, ``zt.chunk-digests``.
    """

    def refuse(rule: str, message: str) -> NoReturn:
        raise FormatError(rule, message, where=label(file, name, role))

    item = ITEM_BYTES.get(part.dtype)
    if item is None:
        refuse("zt.dtype-unknown", f"expected one of the 13 storage dtypes, found {part.dtype[:80]!r}")
    if part.type is not None and part.type in DTYPES and DTYPES[part.type].storage != part.dtype:
        refuse("zt.type-storage", f"expected type {part.type} in {DTYPES[part.type].storage}, found it in {part.dtype}")
    nbytes = part.length if part.encoding == "raw" else part.uncompressed_length
    if part.encoding != "raw" or part.uncompressed_length is not None:
        _check_encoding(part, refuse)
    if nbytes is not None and nbytes % item:
        refuse("zt.part-size", f"expected a multiple of {item} bytes for {part.dtype}, found {nbytes}")
    if part.digest is not None and not _DIGEST(part.digest):
        checksums.algorithm_of(part.digest, "zt.digest-syntax", label(file, name, role))
    if part.ingot_chunks is not None:
        chunks_of(part, label(file, name, role))
    return nbytes


def chunks_of(part: Component, location: str) -> ChunkDigests | None:
    """Return the digests of a part's chunks; raises ``FormatError`` ``zt.chunk-digests`` if they do not fit the
    part."""
    return read_chunks(part.ingot_chunks, part.digest, part.length, "zt.chunk-digests", location)


def _check_encoding(part: Component, refuse: Refuse) -> None:
    decoded = part.uncompressed_length
    if part.encoding == "raw":
        if decoded != part.length:
            refuse("zt.uncompressed-length", f"expected {part.length}, the length of a raw part, found {decoded}")
        return
    if decoded is not None and decoded > MAX_DECODED:
        refuse("zt.uncompressed-length", f"expected at most {MAX_DECODED} bytes, found {decoded}")
    if part.encoding == PACKED:
        if decoded is None:
            refuse("zt.uncompressed-length-missing", f"expected uncompressed_length with encoding {PACKED}")
        if decoded > part.length * packed.MAX_RATIO:
            refuse(
                "zt.packed-ratio",
                f"expected at most {packed.MAX_RATIO} bytes for each stored byte, found {decoded} in {part.length}",
            )
    if part.encoding != "zstd":
        return
    if decoded is None:
        refuse("zt.uncompressed-length-missing", "expected uncompressed_length with encoding zstd, but it is missing")
    if decoded > part.length * MAX_ZSTD_RATIO or part.length == 0:
        refuse(
            "zt.zstd-ratio",
            f"expected at most {MAX_ZSTD_RATIO} bytes for each byte of zstd, found {decoded} in {part.length}",
        )


def _check_dense(file: str, name: str, obj: Object, count: int, nbytes: int | None) -> None:
    part = obj.components["data"]
    row = DTYPES.get(part.type or part.dtype)
    if row is None or nbytes is None:  # an unknown logical type may be compound; its ratio is unknown too
        return
    if row.nbytes(count) != nbytes:
        raise FormatError(
            "zt.dense-size",
            f"expected {row.nbytes(count)} bytes for shape {list(obj.shape)} of {row.name}, found {nbytes}",
            where=label(file, name, "data"),
        )


def _check_sparse(file: str, name: str, obj: Object, sizes: Sizes) -> None:
    """Check the types and sizes of a sparse tensor's parts by the rules in section 3 of zTensor 1.2.

    Index parts must be u64, with one index per value. ``indptr`` must have rows + 1 entries, and ``coords`` rank * nnz.
    """
    for role in _INDEX_PARTS:
        part = obj.components.get(role)
        if part is not None and (part.dtype, part.type or "u64") != ("u64", "u64"):
            raise FormatError(
                "zt.index-dtype", f"expected u64, found {part.type or part.dtype}", where=label(file, name, role)
            )
    values = obj.components["values"]
    row = DTYPES.get(values.type or values.dtype)
    stored = sizes["values"]
    if row is not None and stored is not None and stored * 8 % row.bits:
        raise FormatError(
            "zt.part-size",
            f"expected whole elements of {row.name}, found {stored} bytes",
            where=label(file, name, "values"),
        )
    nnz = None if row is None or stored is None else stored * 8 // row.bits
    expected: dict[str, int | None]
    if obj.format == CsrLayout.codec:
        expected = {"indices": nnz, "indptr": prod(obj.shape[:-1]) + 1}
    else:
        expected = {"coords": None if nnz is None else len(obj.shape) * nnz}
    for role, count in expected.items():
        length = sizes[role]
        if length is not None and count is not None and length != 8 * count:
            raise FormatError(
                "zt.sparse-size", f"expected {count} u64 elements, found {length // 8}", where=label(file, name, role)
            )


def _ranges_of(objects: Mapping[str, Object]) -> tuple[Array, Array]:
    """Return the offsets and lengths of all parts."""
    parts = [part for obj in objects.values() for part in obj.components.values()]
    return np.array([part.offset for part in parts], np.int64), np.array([part.length for part in parts], np.int64)


def check_blobs(file: str, objects: Mapping[str, Object], end: int, ranges: tuple[Array, Array] | None = None) -> int:
    """Check that every blob is aligned, is between the header and byte ``end``, and shares no byte with another.

    Parts may share a complete blob: the return value is the number of parts that do. ``ranges`` are offsets and lengths
    of all parts, if the caller has them.

    Raises
    ------
    FormatError
        ``zt.blob-misaligned``, ``zt.blob-in-header``, ``zt.blob-out-of-bounds``, ``zt.blob-overlap``.
    """
    offsets, lengths = _ranges_of(objects) if ranges is None else ranges
    for rule, message, invalid in (
        (
            "zt.blob-misaligned",
            f"expected an offset that is a multiple of {ALIGNMENT}, found",
            offsets % ALIGNMENT != 0,
        ),
        ("zt.blob-in-header", "expected an offset after the header, found", offsets == 0),
        (
            "zt.blob-out-of-bounds",
            f"expected bytes before the manifest at {end}, found offset",
            (offsets > end) | (lengths > end - offsets),
        ),
    ):
        if invalid.any():
            index = int(np.argmax(invalid))
            raise FormatError(rule, f"{message} {offsets[index]}", where=_nth(file, objects, index))
    filled = np.flatnonzero(lengths)
    order = filled[np.lexsort((lengths[filled], offsets[filled]))]
    is_shared = np.zeros(order.size, np.bool_)
    is_shared[1:] = (np.diff(offsets[order]) == 0) & (np.diff(lengths[order]) == 0)
    order = order[~is_shared]
    overlap = offsets[order[1:]] < (offsets + lengths)[order[:-1]]
    if overlap.any():
        first = int(np.argmax(overlap))
        first_part = _nth(file, objects, int(order[first]))
        raise FormatError(
            "zt.blob-overlap",
            f"expected bytes that no other part has, found bytes that overlap {first_part.partition(': ')[2]}",
            where=_nth(file, objects, int(order[first + 1])),
        )
    return int(is_shared.sum())


def _nth(file: str, objects: Mapping[str, Object], index: int) -> str:
    names = [(name, role) for name, obj in objects.items() for role in obj.components]
    return label(file, *names[index])


def logical_dtype(codec: str, attributes: Mapping[str, Any] | None, parts: Mapping[str, tuple[str, str | None]]) -> str:
    """Return a tensor's logical dtype from its parts' ``(dtype, type)``.

    For dense tensors this is the type of ``data``. For others it is the attribute ``dtype`` if it names a known type,
    else the type of ``values``, of ``scales``, or of the first part.
    """
    if codec != DenseLayout.codec and attributes:
        declared = attributes.get("dtype")
        if isinstance(declared, str) and declared in DTYPES:
            return declared
    for role in ("data",) if codec == DenseLayout.codec else ("values", "scales"):
        if role in parts:
            return parts[role][1] or parts[role][0]
    for dtype, logical in parts.values():
        return logical or dtype
    return "unknown"
