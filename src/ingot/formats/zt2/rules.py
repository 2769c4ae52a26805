"""The rules of a manifest beyond its schema (section 3.6). The checks read no bytes of tensors.

Rules and their reasons are in ``spec/zt2.md``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import NamedTuple, NoReturn

import numpy as np

from ingot.core.bytes.encodings import SEEKABLE, SEEKABLE_LEAST
from ingot.core.numeric.dtypes import MAX_RANK, element_count
from ingot.core.parsing.columns import Array, map_texts, numbers
from ingot.errors import FormatError
from ingot.formats.shared.manifests import label
from ingot.formats.zt2.columns import Objects
from ingot.formats.zt2.layout import ALIGNMENT, FOOTER, MIN_SIZE
from ingot.formats.zt2.manifest import MAX_NAME, Blob, Manifest, Object, Shard, optional_value
from ingot.formats.zt2.profiles import check_profile
from ingot.formats.zt2.types import ITEM_BYTES, nbytes_of, storage_of
from ingot.model.layouts.dense import DenseLayout

MAX_DECODED = 1 << 47
_DIGEST = re.compile(r"xxh3:[0-9a-f]{16}|sha256:[0-9a-f]{64}").fullmatch
_ALGORITHM = re.compile(r"[a-z0-9_.\-]+:[0-9a-f]+").fullmatch
_SHARD = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}").fullmatch


def check_manifest(file: str, manifest: Manifest, size: int, manifest_range: tuple[int, int]) -> None:
    """Check a manifest whose bytes are at ``manifest_range`` (offset, length) in a file of ``size`` bytes.

    Raises
    ------
    FormatError
        ``zt2.name``, ``zt2.shard-name``, ``zt2.shard-size`` and the rules of ``check_object`` and ``check_blobs``.
    """
    check_names(f"{file}: attributes", optional_value(manifest.attributes) or ())
    shards: Mapping[str, Shard] = optional_value(manifest.shards) or {}
    for name, shard in shards.items():
        _check_shard(file, name, shard)
    objects = manifest.objects
    if isinstance(objects, Objects):
        for name in objects.columns.suspects():
            check_object(file, name, objects[name])
    else:
        for name, obj in objects.items():
            if not is_simple_object(name, obj):
                check_object(file, name, obj)
    check_blobs(file, objects, {None: size, **{name: shard.size for name, shard in shards.items()}}, manifest_range)


def is_shard_name(name: str) -> bool:
    """Return whether the manifest's table of shards may contain the name ``name``."""
    return _SHARD(name) is not None


def _check_shard(file: str, name: str, shard: Shard) -> None:
    location = f"{file}: shard {name[:80]!r}"
    if not is_shard_name(name):
        raise FormatError(
            "zt2.shard-name",
            "expected up to 64 letters, digits, '.', '_' or '-', and no '.' at the start",
            where=location,
        )
    if shard.size < MIN_SIZE:
        raise FormatError(
            "zt2.shard-size", f"expected a file of at least {MIN_SIZE} bytes, found {shard.size}", where=location
        )
    _check_digest(shard.digest, location)


def check_names(location: str, names: Iterable[str]) -> None:
    """Raise ``FormatError`` ``zt2.name`` for names that are empty, too long, contain NUL or are not valid UTF-8."""
    for name in names:
        if not 0 < utf8_bytes(name) <= MAX_NAME or "\0" in name:
            raise FormatError(
                "zt2.name",
                f"expected names of 1 to {MAX_NAME} bytes of UTF-8 without NUL, found {name[:40]!r}",
                where=location,
            )


def utf8_bytes(name: str) -> int:
    """Return the number of bytes of a name in UTF-8; 0 if it cannot be encoded."""
    try:
        return len(name.encode())
    except UnicodeEncodeError:
        return 0


def is_simple_object(name: str, obj: Object) -> bool:
    """Return whether an object is a valid dense tensor in one raw part without a logical type.

    If the result is False, the object may still be valid; then ``check_object`` decides.
    """
    part = obj.parts.get("data")
    return (
        part is not None
        and obj.layout == DenseLayout.codec
        and len(obj.parts) == 1
        and optional_value(part.type) is None
        and optional_value(part.encoding) is None
        and optional_value(part.decoded_length) is None
        and optional_value(obj.attributes) is None
        and 0 < part.blob[1] == prod(obj.shape) * ITEM_BYTES.get(part.dtype, 0)
        and len(obj.shape) <= MAX_RANK
        and (optional_value(part.digest) is None or _DIGEST(str(part.digest)) is not None)
        and 0 < len(name) <= MAX_NAME // 4
        and "\0" not in name
    )


def check_object(file: str, name: str, obj: Object) -> None:
    """Check the names, the shape, the types of the parts and, if they are defined, the sizes of a tensor.

    Raises
    ------
    FormatError
        ``zt2.name``, ``zt2.shape``, ``zt2.parts``, the rules of ``check_part``, and the rules of layouts:
        ``zt2.layout``, ``zt2.size``.
    """
    location = label(file, name)
    check_names(location, (name, *obj.parts, *(optional_value(obj.attributes) or ())))
    count = element_count(obj.shape, "zt2.shape", location)
    if not obj.parts:
        raise FormatError("zt2.parts", "expected at least one part, found no parts", where=location)
    for role, part in obj.parts.items():
        check_part(label(file, name, role), part)
    if obj.layout == DenseLayout.codec:
        _check_dense(file, name, obj, count)
    else:
        check_profile(location, obj)


def _check_dense(file: str, name: str, obj: Object, count: int) -> None:
    if list(obj.parts) != ["data"]:
        raise FormatError(
            "zt2.layout",
            f"expected one part 'data' in a dense tensor, found {sorted(obj.parts)[:4]}",
            where=label(file, name),
        )
    part = obj.parts["data"]
    expected = nbytes_of(part.dtype, optional_value(part.type), count)
    if expected is not None and part.nbytes != expected:
        raise FormatError(
            "zt2.size",
            f"expected {expected} bytes for shape {list(obj.shape)} of {optional_value(part.type) or part.dtype}, "
            "found "
            f"{part.nbytes}",
            where=label(file, name, "data"),
        )


def check_part(location: str, part: Blob) -> None:
    """Check types, encoding and digest of a part.

    Raises
    ------
    FormatError
        ``zt2.dtype``, ``zt2.type-storage``, ``zt2.encoding``, ``zt2.digest-syntax``.
    """

    def refuse(rule: str, message: str) -> NoReturn:
        raise FormatError(rule, message, where=location)

    type_ = optional_value(part.type)
    encoding = optional_value(part.encoding)
    if part.dtype not in ITEM_BYTES:
        refuse("zt2.dtype", f"expected one of {', '.join(ITEM_BYTES)}, found {part.dtype[:80]!r}")
    storage = None if type_ is None else storage_of(type_)
    if storage not in (None, part.dtype):
        refuse("zt2.type-storage", f"expected type {type_} in {storage}, found it in {part.dtype}")
    if (encoding is None) != (optional_value(part.decoded_length) is None):
        refuse("zt2.encoding", "expected encoding and decoded_length together, found only one of them")
    if encoding is not None and part.nbytes > MAX_DECODED:
        refuse("zt2.encoding", f"expected at most {MAX_DECODED} decoded bytes, found {part.nbytes}")
    if encoding == SEEKABLE and part.blob[1] < SEEKABLE_LEAST:
        refuse("zt2.encoding", f"expected at least {SEEKABLE_LEAST} bytes of a seek table, found {part.blob[1]}")
    if optional_value(part.digest) is not None:
        _check_digest(str(part.digest), location)


def _check_digest(digest: str, location: str) -> None:
    """Check the syntax of a digest; the number of digits is only checked for registered algorithms."""
    is_registered = digest.partition(":")[0] in ("xxh3", "sha256")
    if not (_DIGEST if is_registered else _ALGORITHM)(digest):
        raise FormatError(
            "zt2.digest-syntax", f"expected 'algorithm:hex' in lower case, found {digest[:80]!r}", where=location
        )


class _Ranges(NamedTuple):
    """The byte ranges of all parts of ``objects``.

    Each array has one element per part: the index of its file, its offset in the file, its length in bytes.
    """

    objects: Mapping[str, Object]
    files: Array
    offsets: Array
    lengths: Array

    def name(self, index: int) -> tuple[str, str]:
        """Return the name of the tensor to which part ``index`` belongs, and the role of the part."""
        return next(names for position, names in enumerate(_names(self.objects)) if position == index)


def _ranges_of(objects: Mapping[str, Object], indices: Mapping[str | None, int]) -> _Ranges:
    """Return the byte ranges of all parts of ``objects``.

    ``indices`` maps the name of a shard to the index of its file; the key None is the file of the manifest. A part in a
    shard that is not in ``indices`` gets the file index -1.
    """
    if isinstance(objects, Objects):
        parts = objects.columns.parts
        named = {name: index for name, index in indices.items() if name is not None}
        files = np.where(numbers(parts.shard.first) < 0, indices[None], map_texts(parts.shard, named))
        return _Ranges(objects, files, numbers(parts.blob.first), numbers(parts.blob.second))
    blobs = [part for obj in objects.values() for part in obj.parts.values()]
    ranges = np.array([part.blob for part in blobs], np.int64).reshape(-1, 2)
    files = np.array([indices.get(optional_value(part.shard), -1) for part in blobs], np.int64)
    return _Ranges(objects, files, ranges[:, 0], ranges[:, 1])


def _names(objects: Mapping[str, Object]) -> Iterator[tuple[str, str]]:
    for name, obj in objects.items():
        for role in obj.parts:
            yield name, role


def check_blobs(
    file: str, objects: Mapping[str, Object], sizes: Mapping[str | None, int], manifest_range: tuple[int, int]
) -> None:
    """Check that every blob is aligned, is within its file, and equals each other blob or shares no byte with it.

    ``sizes`` are the sizes of files in bytes by shard name; the key None is the file of the manifest.
    ``manifest_range`` is the offset and length of the manifest.

    Raises
    ------
    FormatError
        ``zt2.shard-ref``, ``zt2.blob-alignment``, ``zt2.blob-bounds``, ``zt2.blob-overlap``.
    """
    indices = {shard: position for position, shard in enumerate(sizes)}
    ranges = _ranges_of(objects, indices)
    _, files, offsets, lengths = ranges
    if (files < 0).any():
        name, role = ranges.name(int(np.argmax(files < 0)))
        shard = optional_value(objects[name].parts[role].shard)
        raise FormatError(
            "zt2.shard-ref", f"expected a shard of the table, found {shard[:80]!r}", where=label(file, name, role)
        )
    ends = np.array(list(sizes.values()), np.int64)[files] - FOOTER
    for rule, message, invalid in (
        (
            "zt2.blob-alignment",
            f"expected an offset that is a positive multiple of {ALIGNMENT}, found",
            (offsets % ALIGNMENT != 0) | (offsets == 0),
        ),
        (
            "zt2.blob-bounds",
            "expected bytes before the footer of their file, found offset",
            (offsets > ends) | (lengths > ends - offsets),
        ),
    ):
        if invalid.any():
            index = int(np.argmax(invalid))
            raise FormatError(rule, f"{message} {offsets[index]}", where=label(file, *ranges.name(index)))
    filled = np.flatnonzero(lengths)
    files, offsets, lengths = (
        np.append(column[filled], manifest_value)
        for column, manifest_value in ((files, 0), (offsets, manifest_range[0]), (lengths, manifest_range[1]))
    )
    order = np.lexsort((lengths, offsets, files))
    before, after = order[:-1], order[1:]
    same_file = files[before] == files[after]
    differs = (offsets[before] != offsets[after]) | (lengths[before] != lengths[after])
    overlap = same_file & differs & (offsets[after] < offsets[before] + lengths[before])
    if overlap.any():
        index = int(np.argmax(overlap))
        labels = [
            "the manifest" if part_index == filled.size else label("", *ranges.name(int(filled[part_index])))[2:]
            for part_index in (int(before[index]), int(after[index]))
        ]
        raise FormatError(
            "zt2.blob-overlap",
            f"expected blobs that are equal or do not overlap, found {labels[0]} and {labels[1]}",
            where=file,
        )
