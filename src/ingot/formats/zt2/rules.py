"""The rules a manifest must keep beyond its schema (section 3.6). Nothing here reads a tensor's bytes.

Rules and their reasons are on ``spec/zt2.md``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import NamedTuple, NoReturn

import numpy as np

from ingot.core.bytes.checked import MAX_RANK, element_count
from ingot.core.bytes.encodings import SEEKABLE, SEEKABLE_LEAST
from ingot.core.parsing.columns import Array, chosen, numbers
from ingot.errors import FormatError
from ingot.formats.shared.manifests import label
from ingot.formats.zt2.columns import Objects
from ingot.formats.zt2.layout import ALIGNMENT, FOOTER, LEAST
from ingot.formats.zt2.manifest import MAX_NAME, Blob, Manifest, Object, Shard, stated
from ingot.formats.zt2.profiles import check_profile
from ingot.formats.zt2.types import ITEM_BYTES, nbytes_of, storage_of
from ingot.model.layouts.dense import DenseLayout

MAX_DECODED = 1 << 47
_DIGEST = re.compile(r"xxh3:[0-9a-f]{16}|sha256:[0-9a-f]{64}").fullmatch
_ALGORITHM = re.compile(r"[a-z0-9_.\-]+:[0-9a-f]+").fullmatch
_SHARD = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}").fullmatch


def check_manifest(file: str, manifest: Manifest, size: int, own: tuple[int, int]) -> None:
    """Check all that a manifest says, which lies at ``own`` (offset, length) in a file of ``size`` bytes.

    Raises
    ------
    FormatError
        ``zt2.name``, ``zt2.shard-name``, ``zt2.shard-size`` and the rules of ``check_object`` and ``check_places``.
    """
    check_names(f"{file}: attributes", stated(manifest.attributes) or ())
    shards: Mapping[str, Shard] = stated(manifest.shards) or {}
    for name, shard in shards.items():
        _check_shard(file, name, shard)
    objects = manifest.objects
    if isinstance(objects, Objects):
        for name in objects.columns.suspects():
            check_object(file, name, objects[name])
    else:
        for name, obj in objects.items():
            if not plain(name, obj):
                check_object(file, name, obj)
    check_places(file, objects, {None: size, **{name: shard.size for name, shard in shards.items()}}, own)


def is_shard_name(name: str) -> bool:
    """Whether the table may have a shard of this name."""
    return _SHARD(name) is not None


def _check_shard(file: str, name: str, shard: Shard) -> None:
    where = f"{file}: shard {name[:80]!r}"
    if not is_shard_name(name):
        raise FormatError(
            "zt2.shard-name", "expected up to 64 letters, digits, '.', '_' or '-', and no '.' first", where=where
        )
    if shard.size < LEAST:
        raise FormatError(
            "zt2.shard-size", f"expected a file of at least {LEAST} bytes, found {shard.size}", where=where
        )
    _check_digest(shard.digest, where)


def check_names(where: str, names: Iterable[str]) -> None:
    """Refuse, by rule ``zt2.name``, names that are empty, too long, hold a NUL or have no form in UTF-8."""
    for name in names:
        if not 0 < utf8_bytes(name) <= MAX_NAME or "\0" in name:
            raise FormatError(
                "zt2.name",
                f"expected names of 1 to {MAX_NAME} bytes of UTF-8 without NUL, found {name[:40]!r}",
                where=where,
            )


def utf8_bytes(name: str) -> int:
    """Return the bytes of a name in UTF-8; 0 where it has no such form."""
    try:
        return len(name.encode())
    except UnicodeEncodeError:
        return 0


def plain(name: str, obj: Object) -> bool:
    """Whether this is a dense tensor in one raw part of this file without a logical type that breaks no rule."""
    part = obj.parts.get("data")
    return (
        part is not None
        and obj.layout == DenseLayout.codec
        and len(obj.parts) == 1
        and stated(part.type) is None
        and stated(part.encoding) is None
        and stated(part.decoded_length) is None
        and stated(obj.attributes) is None
        and 0 < part.blob[1] == prod(obj.shape) * ITEM_BYTES.get(part.dtype, 0)
        and len(obj.shape) <= MAX_RANK
        and (stated(part.digest) is None or _DIGEST(str(part.digest)) is not None)
        and 0 < len(name) <= MAX_NAME // 4
        and "\0" not in name
    )


def check_object(file: str, name: str, obj: Object) -> None:
    """Check names, shape, parts' types and, where they are known, sizes of one tensor.

    Raises
    ------
    FormatError
        ``zt2.name``, ``zt2.shape``, ``zt2.parts``, the rules of ``check_part``, and those of layouts: ``zt2.layout``,
        ``zt2.size``.
    """
    where = label(file, name)
    check_names(where, (name, *obj.parts, *(stated(obj.attributes) or ())))
    count = element_count(obj.shape, "zt2.shape", where)
    if not obj.parts:
        raise FormatError("zt2.parts", "expected at least one part, found none", where=where)
    for role, part in obj.parts.items():
        check_part(label(file, name, role), part)
    if obj.layout == DenseLayout.codec:
        _check_dense(file, name, obj, count)
    else:
        check_profile(where, obj)


def _check_dense(file: str, name: str, obj: Object, count: int) -> None:
    if list(obj.parts) != ["data"]:
        raise FormatError(
            "zt2.layout",
            f"expected one part 'data' in a dense tensor, found {sorted(obj.parts)[:4]}",
            where=label(file, name),
        )
    part = obj.parts["data"]
    expected = nbytes_of(part.dtype, stated(part.type), count)
    if expected is not None and part.nbytes != expected:
        raise FormatError(
            "zt2.size",
            f"expected {expected} bytes for shape {list(obj.shape)} of {stated(part.type) or part.dtype}, found "
            f"{part.nbytes}",
            where=label(file, name, "data"),
        )


def check_part(where: str, part: Blob) -> None:
    """Check one part's types, encoding and digest.

    Raises
    ------
    FormatError
        ``zt2.dtype``, ``zt2.type-storage``, ``zt2.encoding``, ``zt2.digest-syntax``.
    """

    def refuse(rule: str, message: str) -> NoReturn:
        raise FormatError(rule, message, where=where)

    kind, encoding = stated(part.type), stated(part.encoding)
    if part.dtype not in ITEM_BYTES:
        refuse("zt2.dtype", f"expected one of {', '.join(ITEM_BYTES)}, found {part.dtype[:80]!r}")
    storage = None if kind is None else storage_of(kind)
    if storage not in (None, part.dtype):
        refuse("zt2.type-storage", f"expected type {kind} in {storage}, found it in {part.dtype}")
    if (encoding is None) != (stated(part.decoded_length) is None):
        refuse("zt2.encoding", "expected encoding and decoded_length together, found one of them")
    if encoding is not None and part.nbytes > MAX_DECODED:
        refuse("zt2.encoding", f"expected at most {MAX_DECODED} decoded bytes, found {part.nbytes}")
    if encoding == SEEKABLE and part.blob[1] < SEEKABLE_LEAST:
        refuse("zt2.encoding", f"expected {SEEKABLE_LEAST} bytes of a seek table at least, found {part.blob[1]}")
    if stated(part.digest) is not None:
        _check_digest(str(part.digest), where)


def _check_digest(digest: str, where: str) -> None:
    """Of algorithms that are registered the digits are known; of others only the form."""
    known = digest.partition(":")[0] in ("xxh3", "sha256")
    if not (_DIGEST if known else _ALGORITHM)(digest):
        raise FormatError(
            "zt2.digest-syntax", f"expected 'algorithm:hex' in lower case, found {digest[:80]!r}", where=where
        )


class _Places(NamedTuple):
    """Where all parts lie: numbers of files, offsets, lengths; and how to tell which they are of."""

    objects: Mapping[str, Object]
    files: Array
    offsets: Array
    lengths: Array

    def name(self, index: int) -> tuple[str, str]:
        """Return the tensor and the role of a part."""
        return next(names for number, names in enumerate(_names(self.objects)) if number == index)


def _places_of(objects: Mapping[str, Object], numbered: Mapping[str | None, int]) -> _Places:
    """Return where parts lie; -1 is the number of a file that is not ``numbered``."""
    if isinstance(objects, Objects):
        parts = objects.columns.parts
        known = {name: number for name, number in numbered.items() if name is not None}
        files = np.where(numbers(parts.shard.first) < 0, numbered[None], chosen(parts.shard, known))
        return _Places(objects, files, numbers(parts.blob.first), numbers(parts.blob.second))
    blobs = [part for obj in objects.values() for part in obj.parts.values()]
    places = np.array([part.blob for part in blobs], np.int64).reshape(-1, 2)
    files = np.array([numbered.get(stated(part.shard), -1) for part in blobs], np.int64)
    return _Places(objects, files, places[:, 0], places[:, 1])


def _names(objects: Mapping[str, Object]) -> Iterator[tuple[str, str]]:
    for name, obj in objects.items():
        for role in obj.parts:
            yield name, role


def check_places(
    file: str, objects: Mapping[str, Object], sizes: Mapping[str | None, int], own: tuple[int, int]
) -> None:
    """Check that every blob is aligned, lies in its file, and equals each other blob or shares no byte with it.

    ``sizes`` are the bytes of files by the names that parts give them, None for the file of the manifest, which lies at
    ``own``.

    Raises
    ------
    FormatError
        ``zt2.shard-ref``, ``zt2.blob-alignment``, ``zt2.blob-bounds``, ``zt2.blob-overlap``.
    """
    numbered = {shard: number for number, shard in enumerate(sizes)}
    places = _places_of(objects, numbered)
    _, files, offsets, lengths = places
    if (files < 0).any():
        name, role = places.name(int(np.argmax(files < 0)))
        shard = stated(objects[name].parts[role].shard)
        raise FormatError(
            "zt2.shard-ref", f"expected a shard of the table, found {shard[:80]!r}", where=label(file, name, role)
        )
    ends = np.array(list(sizes.values()), np.int64)[files] - FOOTER
    for rule, message, bad in (
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
        if bad.any():
            index = int(np.argmax(bad))
            raise FormatError(rule, f"{message} {offsets[index]}", where=label(file, *places.name(index)))
    filled = np.flatnonzero(lengths)
    files, offsets, lengths = (
        np.append(column[filled], more) for column, more in ((files, 0), (offsets, own[0]), (lengths, own[1]))
    )
    order = np.lexsort((lengths, offsets, files))
    before, after = order[:-1], order[1:]
    same_file = files[before] == files[after]
    other = (offsets[before] != offsets[after]) | (lengths[before] != lengths[after])
    overlap = same_file & other & (offsets[after] < offsets[before] + lengths[before])
    if overlap.any():
        index = int(np.argmax(overlap))
        found = [
            "the manifest" if at == filled.size else label("", *places.name(int(filled[at])))[2:]
            for at in (int(before[index]), int(after[index]))
        ]
        raise FormatError(
            "zt2.blob-overlap", f"expected blobs that are equal or apart, found {found[0]} and {found[1]}", where=file
        )
