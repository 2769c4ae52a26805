"""Facts about a file that follow from its manifest: content digest (section 6.4), canonical form (section 6.3)."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from typing import Any
from unicodedata import is_normalized

from ingot.core.parsing import cbor
from ingot.errors import UnsupportedError
from ingot.formats.zt2.layout import FOOTER, MAGIC, Footer, align
from ingot.formats.zt2.manifest import Blob, Manifest, Object, optional_value

VERSION = "zt.content/1"


def content_digest(manifest: Manifest, file: str) -> str:
    """Return the content digest: ``sha256:`` and 64 hexadecimal digits, as the command ``zt id`` prints it.

    Offsets, alignment, order, encodings and shards do not affect it.

    Raises ``UnsupportedError`` ``inspect.id``: a part has no digest.
    """
    objects = {name: _content(name, obj, file) for name, obj in manifest.objects.items()}
    return f"sha256:{sha256(cbor.dumps([VERSION, objects], sort=True)).hexdigest()}"


def _content(name: str, obj: Object, file: str) -> dict[str, Any]:
    parts = {}
    for role, part in obj.parts.items():
        fields = {"dtype": part.dtype, "type": optional_value(part.type), "digest": optional_value(part.digest)}
        if fields["digest"] is None:
            raise no_digest_error(file, name, role)
        parts[role] = {key: value for key, value in fields.items() if value is not None}
    entry: dict[str, Any] = {"shape": list(obj.shape), "layout": obj.layout, "parts": parts}
    attributes = optional_value(obj.attributes)
    return entry if attributes is None else {**entry, "attributes": attributes}


def no_digest_error(file: str, name: str, role: str) -> UnsupportedError:
    """Return the error ``inspect.id`` for a part without a digest."""
    return UnsupportedError(
        f"tensor {name[:200]!r} part {role[:80]!r} has no digest, so that the manifest does not identify the contents: "
        "use --content-id, which reads all values",
        rule="inspect.id",
        where=file,
    )


def departures(manifest: Manifest, footer: Footer, size: int) -> Iterator[str]:
    """Yield a sentence for each way in which a file of ``size`` bytes differs from the canonical form."""
    if optional_value(manifest.shards):
        yield "it has shards; the canonical form is a single file"
    for name, role, part in _in_order(manifest):
        for text in (name, role):
            if not is_normalized("NFC", text):
                yield f"the name {text[:200]!r} is not in Unicode normalization form C"
        if optional_value(part.encoding):
            yield f"{_label(name, role)} is compressed"
        if not (optional_value(part.digest) or "").startswith("xxh3:"):
            yield f"{_label(name, role)} has no xxh3 digest"
    yield from _placement(manifest, footer)
    if footer.offset + footer.length + FOOTER != size:
        yield "the footer does not follow the manifest"


def _placement(manifest: Manifest, footer: Footer) -> Iterator[str]:
    """Yield a sentence for each blob of the file, and for the manifest, that breaks a rule of the canonical form.

    The rules determine the offsets, and require equal parts to share a blob.
    """
    end = len(MAGIC)
    lengths: dict[int, int] = {}
    first: dict[tuple[str | None, int], int] = {}
    for name, role, part in _in_order(manifest):
        offset, length = part.blob
        if optional_value(part.shard):
            continue
        if offset in lengths:
            if lengths[offset] != length:
                yield f"{_label(name, role)} shares offset {offset} with a blob of another length"
            continue
        key = optional_value(part.digest), length
        if key[0] is not None and first.setdefault(key, offset) != offset:
            yield f"{_label(name, role)} repeats the bytes at offset {first[key]} instead of sharing them"
        if offset != align(end):
            yield f"{_label(name, role)} is at offset {offset}; its place in the order of names is {align(end)}"
        lengths[offset] = length
        end = offset + length
    if footer.offset != align(end):
        yield f"the manifest is at {footer.offset}; after the tensors it would be at {align(end)}"


def _label(name: str, role: str) -> str:
    return f"{name[:200]!r} part {role[:80]!r}"


def _in_order(manifest: Manifest) -> Iterator[tuple[str, str, Blob]]:
    """Yield names of tensors and parts, and the parts, in the byte order of both names."""
    for name in sorted(manifest.objects, key=lambda text: text.encode(errors="surrogatepass")):
        parts = manifest.objects[name].parts
        for role in sorted(parts, key=lambda text: text.encode(errors="surrogatepass")):
            yield name, role, parts[role]
