"""The directory block (``TDIR``): names, shapes, types, parameters and digests, which the document has no place for.

``[4B "TDIR"][8B length][CBOR map]``; the map's fields are those of ``Directory``. Decision: ``spec/squizd.md``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from ingot.core import cbor, checksums, manifest_digest
from ingot.core.chunk_digests import StatedChunks
from ingot.core.structs import warm
from ingot.errors import FormatError
from ingot.formats.squizd.layout import DIRECTORY_HEADER, DIRECTORY_MAGIC

VERSION = 1
MAX_DIRECTORY = 1 << 30

Unsigned = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


@warm
class Entry(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One tensor.

    ``offset`` is the byte of its block's magic. ``scales`` and ``zeros`` name the type in which the codec has them;
    ``first`` and ``second`` are the offset of the tensor's first entry in that round of the scale tables and the number
    of its entries. ``mask`` is the offset of its mask and its bytes. ``chunks`` are digests of large parts' chunks.
    """

    shape: tuple[Unsigned, ...]
    dtype: str
    codec: str
    layer: Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]
    offset: Unsigned
    params: dict[str, Any] = {}
    scales: str | None = None
    zeros: bool = False
    first: tuple[Unsigned, Unsigned] | None = None
    second: tuple[Unsigned, Unsigned] | None = None
    mask: tuple[Unsigned, Unsigned] | None = None
    digests: dict[str, str] = {}
    chunks: dict[str, StatedChunks] = {}


@warm
class Directory(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """All tensors in file order, the checkpoint's metadata, and digests of the appendices and of the directory."""

    version: int
    tensors: dict[str, Entry]
    metadata: dict[str, Any] = {}
    draft_digest: str | None = None
    coreml_digest: str | None = None
    ingot_digest: str | None = None


def build(directory: Directory, digest: str | None = None, head: bytes = b"") -> bytes:
    """Return the whole block, with a digest of it and of ``head``, the file's header and layer index."""
    if digest is not None:
        directory = msgspec.structs.replace(directory, ingot_digest=manifest_digest.stand_in(digest))
    data = cbor.dumps(msgspec.to_builtins(directory, builtin_types=(bytes,)))
    if digest is not None:
        data = manifest_digest.fill_cbor(data, digest, [head])
    return DIRECTORY_MAGIC + struct.pack("<Q", len(data)) + data


def check(directory: Directory, block: bytes, head: bytes, where: str) -> None:
    """Check the digest that a directory states of itself and of ``head``, if it states one.

    Raises ``IntegrityError`` ``manifest.digest``.
    """
    if directory.ingot_digest is not None:
        manifest_digest.check_cbor(block[DIRECTORY_HEADER:], directory.ingot_digest, f"{where}: directory", [head])


def parse(data: bytes, where: str) -> Directory:
    """Decode and type-check the map.

    Raises
    ------
    FormatError
        ``cbor.*``, ``squizd.directory-schema``, ``squizd.directory-version``, ``squizd.digest``.
    """
    root = cbor.loads(data, where=f"{where}: directory")
    try:
        directory = msgspec.convert(root, Directory)
    except msgspec.ValidationError as error:
        raise FormatError("squizd.directory-schema", str(error), where=f"{where}: directory") from error
    if directory.version != VERSION:
        raise FormatError(
            "squizd.directory-version", f"expected directory version {VERSION}, found {directory.version}", where=where
        )
    for text in _digests(directory):
        checksums.known(text, "squizd.digest", where)
    return directory


def _digests(directory: Directory) -> Sequence[str]:
    own = [text for text in (directory.draft_digest, directory.coreml_digest) if text is not None]
    return own + [text for entry in directory.tensors.values() for text in entry.digests.values()]
