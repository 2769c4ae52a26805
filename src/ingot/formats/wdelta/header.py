"""The JSON header of a ``.wdelta``: parsed into checked entries, and written (spec/wdelta.md, "Header")."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from json.encoder import encode_basestring_ascii
from typing import Any

import msgspec

from ingot.core.numeric.dtypes import DTYPES, dtype, element_count
from ingot.core.parsing.strictjson import preload, strict_json, utf8_fault
from ingot.errors import FormatError, IngotError, UnsupportedError
from ingot.formats.wdelta.entries import Entry, cols
from ingot.formats.wdelta.layout import BY_CODEC, STRATEGIES, VERSIONS
from ingot.model.delta import KEY, Change, DeltaInfo, Identity
from ingot.model.layouts.delta import Int4DeltaLayout, SparseDeltaLayout
from ingot.model.layouts.table import layout_of
from ingot.model.spec import TensorSpec

HASH = "wdelta"
"""The name of the parent hash among the hashes of a delta's base."""

_HEX = re.compile(r"[0-9a-f]{64}\Z")
_DTYPES = ("float32", "float16", "bfloat16")
_LONGEST_REF = 255
_CHUNK = 1 << 16
_NEEDS_COUNT = ("quantized", "int4")


@preload
class Extension(msgspec.Struct, omit_defaults=True):
    """Ingot's extension of the header under ``ingot``, which deltatensors ignores.

    ``strategy`` is the requested strategy if the format does not define it. ``base`` and ``result`` identify both
    artifacts, in addition to the parent hash. ``metadata`` are the checkpoint's metadata.
    """

    strategy: str | None = None
    base: Identity | None = None
    result: Identity | None = None
    metadata: dict[str, Any] = {}


@preload
class Header(msgspec.Struct):
    """The JSON header of a file; the function ``parse`` checks a header completely before it returns the header."""

    parent_hash: str
    strategy: str
    tensors: dict[str, Entry]
    ingot: Extension | None = None

    def metadata(self) -> dict[str, Any]:
        """Return the checkpoint's metadata with the description of the delta."""
        extra = self.ingot or Extension()
        base = extra.base or Identity()
        info = DeltaInfo(
            1,
            extra.strategy or self.strategy,
            Identity(base.content, {**base.hashes, HASH: self.parent_hash}),
        )
        if extra.result is not None:
            info = msgspec.structs.replace(info, result=extra.result)
        changes = {name: msgspec.to_builtins(entry.change) for name, entry in self.tensors.items()}
        return {**extra.metadata, KEY: {**info.to_metadata(), **({"tensors": changes} if changes else {})}}


_DECODER = msgspec.json.Decoder(Header)


def is_hash(text: str) -> bool:
    """Return whether this is a SHA-256 in the header's form: 64 lower-case hexadecimal digits."""
    return _HEX.match(text) is not None


def parse(data: bytes | bytearray, version: int, location: str) -> Header:
    """Return the header after checks of its types, and then of its keys and values.

    The memory for the checks is limited by the header's length.

    Raises ``FormatError`` with the rules of spec/wdelta.md, ``UnsupportedError`` ``wdelta.dtype``.
    """
    try:
        header = _DECODER.decode(data)
    except msgspec.ValidationError as error:
        raise FormatError(
            "wdelta.fields", f"a field of the header is missing or wrong: {error}", where=location
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        fault = utf8_fault(data, error)
        if fault is not None:
            raise FormatError("wdelta.utf8", f"the header is not UTF-8: {fault}", where=location) from error
        raise FormatError("wdelta.json", f"the header is not JSON: {error}", where=location) from error
    strict_json(data, "wdelta.json", "wdelta.duplicate-key", location)
    header.parent_hash = header.parent_hash.lower() if header.parent_hash.isascii() else header.parent_hash
    if not is_hash(header.parent_hash):
        raise FormatError(
            "wdelta.parent-hash", f"expected 64 hexadecimal digits, found {header.parent_hash[:80]!r}", where=location
        )
    if header.ingot is not None and KEY in header.ingot.metadata:
        raise FormatError("wdelta.fields", f"expected no {KEY!r} among the metadata of 'ingot'", where=location)
    _require_strategy(header.strategy, location)
    for name, entry in header.tensors.items():
        _check(entry, version, f"{location}: {name}")
    return header


def _require_strategy(strategy: str, location: str) -> None:
    if strategy not in STRATEGIES:
        raise FormatError(
            "wdelta.strategy", f"expected {', '.join(STRATEGIES)}, found {strategy[:80]!r}", where=location
        )


def _check(entry: Entry, version: int, location: str) -> None:
    _require_strategy(entry.strategy, location)
    size = element_count(entry.shape, "wdelta.shape", location)
    rounds = entry.dtype != "float32"  # differences of 4-bit codes are always float32
    if entry.dtype not in _DTYPES or (rounds and (entry.strategy == "int4" or entry.base_dtype is not None)):
        raise UnsupportedError(
            f"expected differences in float32, found {entry.dtype[:80]!r}", rule="wdelta.dtype", where=location
        )
    if entry.base_dtype is not None:
        _require_base_dtype(entry.base_dtype, location)
    _check_references(entry, location)
    if entry.strategy in _NEEDS_COUNT and entry.n_elements != size:
        raise FormatError(
            "wdelta.n-elements",
            f"expected n_elements {size} for shape {list(entry.shape)}, found {entry.n_elements}",
            where=location,
        )
    if entry.strategy == "quantized" and entry.n_cols != cols(entry.shape):
        raise FormatError(
            "wdelta.n-cols",
            f"expected n_cols {cols(entry.shape)} for shape {list(entry.shape)}, found {entry.n_cols}",
            where=location,
        )
    if entry.strategy == "int4":
        _check_int4(entry, size, version, location)


def _check_references(entry: Entry, location: str) -> None:
    """Raise an error if arrays share a record, or if a record has the name of another field.

    ``deltatensors.read_wdelta`` finds arrays by the names of their fields and ignores references.
    """
    fields = STRATEGIES[entry.strategy].fields
    names = [entry.record_of(field) for field in fields]
    for field, name in zip(fields, names, strict=True):
        if (name != field and name in fields) or names.count(name) > 1 or len(name.encode()) > _LONGEST_REF:
            raise FormatError("wdelta.ref", f"expected a reference to {field!r}, found {name[:80]!r}", where=location)


def _check_int4(entry: Entry, size: int, version: int, location: str) -> None:
    if entry.n_outliers is None or entry.n_outliers > size:
        raise FormatError(
            "wdelta.n-outliers", f"expected n_outliers from 0 to {size}, found {entry.n_outliers}", where=location
        )
    if entry.int4_layout not in ((None, 1) if version == 1 else (None, 1, 2)):
        raise FormatError(
            "wdelta.int4-layout", f"version {version} has no int4_layout {entry.int4_layout}", where=location
        )


def _require_base_dtype(spelling: str, location: str) -> None:
    try:
        dtype(spelling)
    except IngotError as error:
        raise FormatError(
            "wdelta.base-dtype", f"expected an element type such as bfloat16, found {spelling[:80]!r}", where=location
        ) from error


def version_of(specs: Sequence[TensorSpec]) -> int:
    """Return the version of the file: 2 if 4-bit codes have the layout of version 2, else 1."""
    return VERSIONS[any(_int4_layout(spec) == 2 for spec in specs)]


def _int4_layout(spec: TensorSpec) -> int | None:
    layout = layout_of(spec)
    return layout.layout if isinstance(layout, Int4DeltaLayout) else None


def describe(
    specs: Sequence[TensorSpec], metadata: Mapping[str, Any], info: DeltaInfo, version: int
) -> Iterator[bytearray]:
    """Yield the header of a file in chunks; keys have the order in which deltatensors 0.2.0 writes them.

    Raises ``UnsupportedError`` ``wdelta.metadata`` for metadata that JSON cannot encode.
    """
    first = BY_CODEC[specs[0].codec].name if specs else "sparse"
    strategy = info.strategy if info.strategy in STRATEGIES else first
    hashes = {key: value for key, value in info.base.hashes.items() if key != HASH}
    extra = Extension(
        None if info.strategy == strategy else info.strategy,
        _or_none(Identity(info.base.content, hashes)),
        _or_none(info.result),
    )
    other_metadata = {key: value for key, value in metadata.items() if key != KEY}
    header = {"parent_hash": info.base.hashes.get(HASH, "0" * 64), "strategy": strategy, "tensors": {}}
    try:
        added = {**msgspec.to_builtins(extra), **({"metadata": other_metadata} if other_metadata else {})}
        chunk = bytearray(_json(header)[:-2])  # the beginning, up to the first tensor
        for entry in _entries(specs, info, version):
            if len(chunk) >= _CHUNK:
                yield chunk
                chunk = bytearray()
            chunk += entry
        if specs:
            del chunk[-1:]
        chunk += b"}," + _json({"ingot": added})[1:] if added else b"}}"
        yield chunk
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise UnsupportedError(f"metadata that JSON cannot hold: {error}", rule="wdelta.metadata") from error


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _entries(specs: Sequence[TensorSpec], info: DeltaInfo, version: int) -> Iterator[bytes]:
    """Yield the header's entry for each tensor, followed by a comma."""
    for spec in specs:
        entry = _json(_entry(spec, info.tensors.get(spec.name), version))
        yield encode_basestring_ascii(spec.name).encode() + b":" + entry + b","


def _or_none(identity: Identity) -> Identity | None:
    return None if identity == Identity() else identity


def _entry(spec: TensorSpec, change: Change | None, version: int) -> dict[str, Any]:
    strategy = BY_CODEC[spec.codec]
    entry: dict[str, Any] = {"strategy": strategy.name, "shape": list(spec.shape), "dtype": "float32"}
    result = change.dtype if change is not None else "f32"
    if version == 2 or result != "f32":
        entry["base_dtype"] = DTYPES[result].numpy
    layout = layout_of(spec)
    if isinstance(layout, SparseDeltaLayout) and layout.sparsity is not None:
        entry["sparsity"] = layout.sparsity
    if strategy.name == "quantized":
        entry |= {"n_elements": spec.size, "n_cols": cols(spec.shape)}
    if isinstance(layout, Int4DeltaLayout):
        if layout.outlier_fraction is not None:
            entry["outlier_fraction"] = layout.outlier_fraction
        entry |= {"n_elements": spec.size, "n_outliers": (spec.part("outlier_vals").length or 0) // 2}
        if layout.layout == 2:
            entry["int4_layout"] = 2
    return entry | {field: {"_ref": field} for field in strategy.fields}
