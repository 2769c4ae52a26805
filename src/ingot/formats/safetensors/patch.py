"""Sparse patches in safetensors files: two entries per tensor, positions and new values (``spec/sparse_patch.md``).

The reader accepts both versions of TRL's ``AsyncGRPOTrainer``. If the caller requests a delta, it also accepts entries
without metadata, as prime-rl writes them. The writer writes TRL's second version with absolute positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ingot.core.bytes import checksums
from ingot.core.numeric.dtypes import DTYPES, element_count
from ingot.core.parsing import manifest_digest
from ingot.core.parsing.strictjson import preload
from ingot.errors import FormatError, UnsupportedError
from ingot.formats.base import Catalog
from ingot.model.delta import KEY, Change, DeltaInfo, Identity
from ingot.model.layouts.delta import INDEX_TYPES, RAW, PatchLayout
from ingot.model.spec import TensorSpec
from ingot.model.tensor import Tensor
from ingot.reporting.report import Column, Table

CODEC = PatchLayout.codec
STRATEGY = "sparse-patch"
FORMAT = "sparse_weight_patch"
VERSION = "1"
INGOT_KEY = "ingot"
"""The key of ``__metadata__`` for Ingot's additions: shapes, and the metadata of the fine-tune."""

FIRST, SECOND = (".indices", ".values"), (".idx", ".val")
"""Suffixes of the entries for positions and values, in the first and the second version."""

ALGORITHM = "crc32c"


@preload
class _IngotFields(msgspec.Struct, omit_defaults=True):
    """The metadata entry ``INGOT_KEY`` of a patch: shapes and digests by name, and the checkpoint's metadata."""

    shapes: dict[str, list[int]] = {}
    metadata: dict[str, Any] = {}
    digests: dict[str, str] = {}


def read_patch(catalog: Catalog, location: str, *, verify: bool = True) -> Catalog:
    """Return the catalog of a delta, from a file of positions and values.

    Raises
    ------
    FormatError
        ``sparse_patch.version``, ``sparse_patch.metadata``, ``sparse_patch.pair``, ``sparse_patch.shape``,
        ``sparse_patch.index-dtype``, ``part.digest``.
    UnsupportedError
        ``sparse_patch.encoding``: positions are compressed by a library for other processors.
    """
    header_metadata = catalog.metadata
    if header_metadata.get("version", VERSION) != VERSION:
        raise FormatError(
            "sparse_patch.version",
            f"expected version {VERSION}, found {header_metadata['version'][:40]!r}",
            where=location,
        )
    second = "encoding" in header_metadata or "sparse" in header_metadata
    encoding = header_metadata.get("encoding", RAW)
    if encoding not in INDEX_TYPES:
        raise UnsupportedError(
            f"expected positions encoded as {' or '.join(INDEX_TYPES)}, found {encoding[:40]!r}; write the patch "
            "with one of these",
            rule="sparse_patch.encoding",
            where=location,
        )
    fields = _parse_ingot_fields(header_metadata, location)
    _set_digests(catalog.tensors, fields.digests, location, verify=verify)
    tensors = _pairs(catalog.tensors, SECOND if second else FIRST, encoding, fields, location)
    info: Any = header_metadata.get(KEY) or _describe(tensors).to_metadata()
    rows = tuple((key, value[:200]) for key, value in header_metadata.items() if key not in (KEY, INGOT_KEY))
    details = (Table("", (Column("", head="field"), Column("", head="value")), rows, "Sparse patch"),)
    return replace(
        catalog,
        tensors=tensors,
        metadata={**fields.metadata, KEY: info},
        details=lambda: details,
        manifest_digest=manifest_digest.KEY in header_metadata,
    )


def read_pairs(catalog: Catalog, location: str) -> Catalog | None:
    """Return a file as a delta if all of its entries are positions and values, even without metadata; else None.

    Other readers treat such a file as ordinary tensors.
    """
    for suffixes in (FIRST, SECOND):
        names = [name for name in catalog.tensors if name.endswith(suffixes)]
        if names and len(names) == len(catalog.tensors):
            tensors = _pairs(catalog.tensors, suffixes, RAW, _IngotFields(), location)
            return replace(catalog, tensors=tensors, metadata={KEY: _describe(tensors).to_metadata()})
    return None


def keys_of(name: str) -> tuple[str, str]:
    """Return the names of the entries for a tensor's positions and values."""
    return name + SECOND[0], name + SECOND[1]


def why_patch_unsupported(spec: TensorSpec) -> str | None:
    """Return why a sparse patch cannot be written as two entries; None if it can."""
    parts = {part.role: part for part in spec.parts}
    if set(parts) != {"indices", "values"} or any(part.encoding != "raw" for part in spec.parts):
        return "safetensors holds a sparse patch as uncompressed parts indices and values"
    row = DTYPES.get(spec.dtype)
    if row is None or row.safetensors is None:
        return f"safetensors has no element type {spec.dtype}"
    if parts["indices"].dtype not in ("i32", "i64", "u16", "u32"):
        return f"positions are of {parts['indices'].dtype}"
    return None


def written_metadata(
    specs: Sequence[TensorSpec], metadata: Mapping[str, str], digests: Mapping[str, str]
) -> dict[str, str]:
    """Return the ``__metadata__`` of a file with the patches ``specs``: fields of TRL, of the delta and of Ingot.

    ``digests`` maps entries of the file to digests. If it is not empty, the header ends with its own digest.

    Raises ``UnsupportedError`` ``sparse_patch.mixed`` if positions have two encodings.
    """
    patches = [spec for spec in specs if spec.codec == CODEC]
    encodings = sorted({PatchLayout.from_tensor(spec).encoding for spec in patches}) or [RAW]
    if len(encodings) > 1:
        raise UnsupportedError(
            f"a sparse patch has one encoding of positions, found {' and '.join(encodings)}", rule="sparse_patch.mixed"
        )
    changed = sum(_count(spec) for spec in patches)
    elements = sum(spec.size for spec in patches)
    shapes = {spec.name: list(spec.shape) for spec in patches if not PatchLayout.from_tensor(spec).flat}
    fields = _IngotFields(shapes, {key: value for key, value in metadata.items() if key != KEY}, dict(digests))
    delta = {KEY: metadata[KEY]} if KEY in metadata else {}
    header_digest = {manifest_digest.KEY: manifest_digest.stand_in(ALGORITHM)} if digests or not specs else {}
    return {
        "format": FORMAT,
        "version": VERSION,
        "sparse": "True",
        "model_version": "0",
        "num_changed_params": str(len(patches)),
        "total_changed_elements": str(changed),
        "total_elements": str(elements),
        "sparsity": str(1.0 - changed / max(elements, 1)),
        "encoding": encodings[0],
        **delta,
        INGOT_KEY: msgspec.json.encode(fields).decode(),
        **header_digest,
    }


def _count(spec: TensorSpec) -> int:
    return (spec.part("values").length or 0) * 8 // DTYPES[spec.dtype].bits


def _parse_ingot_fields(header_metadata: Mapping[str, str], location: str) -> _IngotFields:
    if INGOT_KEY not in header_metadata:
        return _IngotFields()
    try:
        fields = msgspec.json.decode(header_metadata[INGOT_KEY], type=_IngotFields)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise FormatError("sparse_patch.metadata", f"{INGOT_KEY!r}: {error}", where=location) from error
    for name, shape in fields.shapes.items():
        if any(size < 0 for size in shape):
            raise FormatError("sparse_patch.metadata", f"expected sizes from 0, found {shape}"[:200], where=location)
        element_count(shape, "sparse_patch.metadata", f"{location}: {name[:200]}")
    if KEY in fields.metadata:
        raise FormatError("sparse_patch.metadata", f"expected no {KEY!r} under {INGOT_KEY!r}", where=location)
    return fields


def _set_digests(tensors: Mapping[str, Tensor], digests: Mapping[str, str], location: str, *, verify: bool) -> None:
    """Set the digests of all parts from the metadata."""
    for key, text in digests.items():
        checksums.algorithm_of(text, "part.digest", f"{location}: {key[:200]}")
        if key in tensors:
            part = tensors[key].parts["data"]
            part.digest = text
            part.verify = verify


def _pairs(
    tensors: Mapping[str, Tensor], suffixes: tuple[str, str], encoding: str, fields: _IngotFields, location: str
) -> dict[str, Tensor]:
    """Return the tensors of a patch; positions and values of the same name form one tensor.

    An entry that is neither positions nor values is a dense tensor, which replaces the base's tensor completely.
    """
    pairs: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if not key.endswith(suffixes):
            if key in pairs:
                raise _incomplete_pair(key, "the tensor itself and also its patch", location)
            pairs[key] = tensor
            continue
        name = key.removesuffix(suffixes[key.endswith(suffixes[1])])
        if name in pairs and pairs[name].codec == CODEC:
            continue
        pair = [name + suffix for suffix in suffixes]
        if name in tensors or any(key_of_pair not in tensors for key_of_pair in pair):
            raise _incomplete_pair(name, f"{key[:200]!r} without the other entry of the pair", location)
        pairs[name] = _pair(name, tensors[pair[0]], tensors[pair[1]], encoding, fields.shapes.get(name), location)
    stray = next((name for name in fields.shapes if name not in pairs), None)
    if stray is not None:
        raise FormatError(
            "sparse_patch.metadata", f"expected shapes for tensors of this file only, found one for {stray[:200]!r}"
        )
    return pairs


def _pair(name: str, indices: Tensor, values: Tensor, encoding: str, shape: list[int] | None, location: str) -> Tensor:
    location = f"{location}: {name[:200]}"
    if len(indices.shape) != 1 or indices.shape != values.shape:
        raise FormatError(
            "sparse_patch.shape",
            f"expected equally many positions and values, in one dimension, found {list(indices.shape)[:8]} and "
            f"{list(values.shape)[:8]}",
            where=location,
        )
    if indices.dtype not in INDEX_TYPES[encoding]:
        raise FormatError(
            "sparse_patch.index-dtype",
            f"expected {encoding} positions of {' or '.join(INDEX_TYPES[encoding])}, found {indices.dtype}",
            where=location,
        )
    parts = {"indices": indices.parts["data"], "values": values.parts["data"]}
    layout = PatchLayout(encoding, flat=shape is None)
    full_shape = values.shape if shape is None else tuple(shape)
    return Tensor(name, full_shape, values.dtype, layout.codec, parts, layout.attributes())


def _incomplete_pair(name: str, problem: str, location: str) -> FormatError:
    return FormatError(
        "sparse_patch.pair", f"expected positions and values, found {problem}", where=f"{location}: {name[:200]}"
    )


def _describe(tensors: Mapping[str, Tensor]) -> DeltaInfo:
    """Create the description of a delta for a file that contains none."""
    changes = {
        name: Change("apply" if tensor.codec == CODEC else "replace", tensor.dtype) for name, tensor in tensors.items()
    }
    return DeltaInfo(1, STRATEGY, Identity(), tensors=changes)
