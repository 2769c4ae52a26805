"""Compute the id of an artifact's contents from the digests in its manifest, and check the canonical form of a file
(``spec/operations.md``).
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from typing import Any

from ingot.artifacts.open import Source
from ingot.core.parsing import cbor
from ingot.errors import UsageError
from ingot.formats.zt2 import canonical
from ingot.formats.zt2.manifest import parse
from ingot.formats.zt2.reader import read_footer
from ingot.inspect.findings import Finding
from ingot.model.tensor import Tensor

VERSION = "ingot.content/1"
_CONTAINER = "zt2"


def manifest_id(source: Source) -> str:
    """Return an artifact's id, ``sha256:`` and hex digits, from the recorded digests of its parts. No part is read.

    For container 2 of ``.zt``, it is the content digest that the container's specification defines. It does not depend
    on the order and offsets of tensors, or on the files that contain them.

    Raises ``UnsupportedError`` ``inspect.id``: a part has no digest.
    """
    if source.format.name == _CONTAINER:
        return canonical.content_digest(parse(source.catalog.headers[source.entry], source.location), source.location)
    tensors = {tensor.name: _content(tensor, source.location) for tensor in source.view().values()}
    return f"sha256:{sha256(cbor.dumps([VERSION, tensors], sort=True)).hexdigest()}"


def _content(tensor: Tensor, location: str) -> dict[str, Any]:
    parts = {}
    for role, part in tensor.parts.items():
        if part.digest is None:
            raise canonical.no_digest_error(location, tensor.name, role)
        is_encoded = part.stored_digest is not None and part.encoding != "raw"
        fields = {
            "dtype": part.dtype,
            "type": part.type,
            "digest": part.digest,
            "encoding": part.encoding if is_encoded else None,  # the digest depends on it
        }
        parts[role] = {key: value for key, value in fields.items() if value is not None}
    entry: dict[str, Any] = {"shape": list(tensor.shape), "layout": tensor.codec, "parts": parts}
    return {**entry, "attributes": dict(tensor.params)} if tensor.params else entry


def canonical_findings(source: Source) -> Iterator[Finding]:
    """Yield an error ``zt2.canonical`` for each difference from the canonical form; a note if there is none.

    Raises ``UsageError`` ``verify.canonical``: the format has no canonical form.
    """
    if source.format.name != _CONTAINER:
        raise UsageError(
            f"expected a .zt file of container 2, which has a canonical form, found {source.format.name}",
            rule="verify.canonical",
            where=source.location,
        )
    manifest = parse(source.catalog.headers[source.entry], source.location)
    file = next(item for item in source.catalog.sources if item.name == source.store.location_of(source.entry))
    level = "note"
    for sentence in canonical.departures(manifest, read_footer(file), file.size):
        level = "error"
        yield Finding("error", "zt2.canonical", source.location, f"not canonical: {sentence}")
    if level == "note":
        message = "the file is canonical: the same tensors give the same bytes"
        yield Finding(level, "zt2.canonical", source.location, message)
