"""Sparse patches in safetensors files: two entries per tensor, positions and new values (``spec/sparse_patch.md``).

Read are both versions that TRL's ``AsyncGRPOTrainer`` has written, and, where a delta is asked for, pairs without any
metadata as prime-rl writes them; written is TRL's second version with positions as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ingot.core.bytes import checksums
from ingot.core.bytes.checked import element_count
from ingot.core.numeric.dtypes import DTYPES
from ingot.core.parsing import manifest_digest
from ingot.core.parsing.structs import warm
from ingot.errors import FormatError, UnsupportedError
from ingot.formats.base import Catalog
from ingot.model.delta import KEY, Change, DeltaInfo, Identity
from ingot.model.layouts.delta import INDEX_TYPES, RAW, PatchLayout
from ingot.model.spec import TensorSpec
from ingot.model.tensor import Tensor
from ingot.reporting.report import Column, Table

CODEC = PatchLayout.codec
STRATEGY = "sparse-patch"
FORMAT, VERSION = "sparse_weight_patch", "1"
OWN = "ingot"
"""The key of ``__metadata__`` for what Ingot adds: shapes, and the fine-tune's own metadata."""

FIRST, SECOND = (".indices", ".values"), (".idx", ".val")
"""Suffixes of positions and values, of the first and the second version."""

ALGORITHM = "crc32c"


@warm
class _Own(msgspec.Struct, omit_defaults=True):
    """What stands under ``OWN``, as JSON."""

    shapes: dict[str, list[int]] = {}
    metadata: dict[str, Any] = {}
    digests: dict[str, str] = {}


def is_patch(metadata: Mapping[str, Any]) -> bool:
    """Whether a file's metadata makes it a sparse patch; TRL's whole checkpoints say ``sparse`` ``False``."""
    return metadata.get("format") == FORMAT and metadata.get("sparse", "True") == "True"


def read_patch(catalog: Catalog, where: str, *, verify: bool = True) -> Catalog:
    """Return a file of pairs as a delta.

    Raises
    ------
    FormatError
        ``sparse_patch.version``, ``sparse_patch.metadata``, ``sparse_patch.pair``, ``sparse_patch.shape``,
        ``sparse_patch.index-dtype``, ``part.digest``.
    UnsupportedError
        ``sparse_patch.encoding``: positions that a library for other processors has compressed.
    """
    told = catalog.metadata
    if told.get("version", VERSION) != VERSION:
        raise FormatError(
            "sparse_patch.version", f"expected version {VERSION}, found {told['version'][:40]!r}", where=where
        )
    second = "encoding" in told or "sparse" in told
    encoding = told.get("encoding", RAW)
    if encoding not in INDEX_TYPES:
        raise UnsupportedError(
            f"expected positions encoded as {' or '.join(INDEX_TYPES)}, found {encoding[:40]!r}; write the patch "
            "with one of these",
            rule="sparse_patch.encoding",
            where=where,
        )
    own = _own(told, where)
    _state_digests(catalog.tensors, own.digests, where, verify=verify)
    tensors = _pairs(catalog.tensors, SECOND if second else FIRST, encoding, own, where)
    info: Any = told.get(KEY) or _described(tensors).to_metadata()
    rows = tuple((key, value[:200]) for key, value in told.items() if key not in (KEY, OWN))
    details = (Table("", (Column("", head="field"), Column("", head="value")), rows, "Sparse patch"),)
    return replace(
        catalog,
        tensors=tensors,
        metadata={**own.metadata, KEY: info},
        details=lambda: details,
        manifest_digest=manifest_digest.KEY in told,
    )


def read_pairs(catalog: Catalog, where: str) -> Catalog | None:
    """Return a file as a delta if all that it holds are pairs, whatever it says of itself; None if not.

    Such a file is ordinary tensors to everybody who does not look for a delta.
    """
    for suffixes in (FIRST, SECOND):
        names = [name for name in catalog.tensors if name.endswith(suffixes)]
        if names and len(names) == len(catalog.tensors):
            tensors = _pairs(catalog.tensors, suffixes, RAW, _Own(), where)
            return replace(catalog, tensors=tensors, metadata={KEY: _described(tensors).to_metadata()})
    return None


def keys_of(name: str) -> tuple[str, str]:
    """Return the names of a tensor's positions and values in the file that is written."""
    return name + SECOND[0], name + SECOND[1]


def refusal(spec: TensorSpec) -> str | None:
    """Why a sparse patch cannot be stored as a pair; None if it can."""
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
    """Return the ``__metadata__`` of a file with the patches ``specs``: TRL's fields, the delta's, Ingot's.

    ``digests`` are those of the file's entries by key, and make the header end with a digest of itself.

    Raises ``UnsupportedError`` ``sparse_patch.mixed``: positions in two encodings.
    """
    patches = [spec for spec in specs if spec.codec == CODEC]
    encodings = sorted({PatchLayout.of(spec).encoding for spec in patches}) or [RAW]
    if len(encodings) > 1:
        raise UnsupportedError(
            f"a sparse patch has one encoding of positions, found {' and '.join(encodings)}", rule="sparse_patch.mixed"
        )
    changed = sum(_count(spec) for spec in patches)
    elements = sum(spec.size for spec in patches)
    shapes = {spec.name: list(spec.shape) for spec in patches if not PatchLayout.of(spec).flat}
    own = _Own(shapes, {key: value for key, value in metadata.items() if key != KEY}, dict(digests))
    delta = {KEY: metadata[KEY]} if KEY in metadata else {}
    whole = {manifest_digest.KEY: manifest_digest.stand_in(ALGORITHM)} if digests or not specs else {}
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
        OWN: msgspec.json.encode(own).decode(),
        **whole,
    }


def _count(spec: TensorSpec) -> int:
    return (spec.part("values").length or 0) * 8 // DTYPES[spec.dtype].bits


def _own(told: Mapping[str, str], where: str) -> _Own:
    if OWN not in told:
        return _Own()
    try:
        own = msgspec.json.decode(told[OWN], type=_Own)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise FormatError("sparse_patch.metadata", f"{OWN!r}: {error}", where=where) from error
    for name, shape in own.shapes.items():
        if any(size < 0 for size in shape):
            raise FormatError("sparse_patch.metadata", f"expected sizes from 0, found {shape}"[:200], where=where)
        element_count(shape, "sparse_patch.metadata", f"{where}: {name[:200]}")
    if KEY in own.metadata:
        raise FormatError("sparse_patch.metadata", f"expected no {KEY!r} under {OWN!r}", where=where)
    return own


def _state_digests(tensors: Mapping[str, Tensor], digests: Mapping[str, str], where: str, *, verify: bool) -> None:
    """Give every entry's part the digest that the metadata has of it."""
    for key, text in digests.items():
        checksums.known(text, "part.digest", f"{where}: {key[:200]}")
        if key in tensors:
            part = tensors[key].parts["data"]
            part.digest, part.verify = text, verify


def _pairs(
    tensors: Mapping[str, Tensor], suffixes: tuple[str, str], encoding: str, own: _Own, where: str
) -> dict[str, Tensor]:
    """Put positions and values together; what is no pair is a tensor that is replaced whole."""
    pairs: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if not key.endswith(suffixes):
            if key in pairs:
                raise _lonely(key, "the tensor itself beside its patch", where)
            pairs[key] = tensor
            continue
        name = key.removesuffix(suffixes[key.endswith(suffixes[1])])
        if name in pairs and pairs[name].codec == CODEC:
            continue
        pair = [name + suffix for suffix in suffixes]
        if name in tensors or any(other not in tensors for other in pair):
            raise _lonely(name, f"{key[:200]!r} without the other", where)
        pairs[name] = _pair(name, tensors[pair[0]], tensors[pair[1]], encoding, own.shapes.get(name), where)
    stray = next((name for name in own.shapes if name not in pairs), None)
    if stray is not None:
        raise FormatError("sparse_patch.metadata", f"a shape is stated for {stray[:200]!r}, which is not there")
    return pairs


def _pair(name: str, indices: Tensor, values: Tensor, encoding: str, shape: list[int] | None, where: str) -> Tensor:
    where = f"{where}: {name[:200]}"
    if len(indices.shape) != 1 or indices.shape != values.shape:
        raise FormatError(
            "sparse_patch.shape",
            f"expected as many positions as values, in one dimension, found {list(indices.shape)[:8]} and "
            f"{list(values.shape)[:8]}",
            where=where,
        )
    if indices.dtype not in INDEX_TYPES[encoding]:
        raise FormatError(
            "sparse_patch.index-dtype",
            f"expected {encoding} positions of {' or '.join(INDEX_TYPES[encoding])}, found {indices.dtype}",
            where=where,
        )
    parts = {"indices": indices.parts["data"], "values": values.parts["data"]}
    layout = PatchLayout(encoding, flat=shape is None)
    own = values.shape if shape is None else tuple(shape)
    return Tensor(name, own, values.dtype, layout.codec, parts, layout.attributes())


def _lonely(name: str, found: str, where: str) -> FormatError:
    return FormatError(
        "sparse_patch.pair", f"expected positions and values, found {found}", where=f"{where}: {name[:200]}"
    )


def _described(tensors: Mapping[str, Tensor]) -> DeltaInfo:
    """Return what can be said of a delta whose file says nothing of its base."""
    changes = {
        name: Change("apply" if tensor.codec == CODEC else "replace", tensor.dtype) for name, tensor in tensors.items()
    }
    return DeltaInfo(1, STRATEGY, Identity(), tensors=changes)
