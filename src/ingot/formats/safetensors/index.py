"""Shards: ``model.safetensors.index.json`` maps tensor names to files in the same folder.

The layout is that of Hugging Face's ``save_pretrained``: ``{"metadata": {"total_size": bytes, ...}, "weight_map":
{name: file}}``. The shards are safetensors files, whose headers take precedence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ingot.core.parsing.manifest_digest import KEY
from ingot.core.parsing.strictjson import preload, strict_json
from ingot.errors import FormatError, UsageError
from ingot.formats.base import Catalog
from ingot.formats.safetensors.header import MAX_HEADER, PREFIX, File, open_file, tensors_of
from ingot.formats.safetensors.pieces import Carrier, tensor_bytes
from ingot.formats.shared.single import headers_of
from ingot.model.reading.ranges import read_bytes
from ingot.model.spec import TensorSpec
from ingot.model.store import Store

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
MAX_INDEX = 100_000_000
# an index of at most this number of bytes is fast to parse
_SMALL = 1 << 20


def read_sharded(store: Store, name: str, *, verify: bool = True) -> Catalog:
    """Read an index and the headers of all its shards as one checkpoint; shards are sorted by name."""
    raw = store.read(name, MAX_INDEX, "safetensors.index-length")
    _require_room(store, name, len(raw))
    weight_map, total = _parse(raw, name)
    files: list[File] = []
    try:
        for shard in sorted(set(weight_map.values())):
            try:
                files.append(open_file(store, shard, verify=verify))
            except UsageError as error:
                raise FormatError(
                    "safetensors.index-missing-shard",
                    f"expected the shard {shard[:200]!r}: {error.message}; was the download complete?",
                    where=name,
                ) from error
        notes = _check_against(files, weight_map, name)
        notes += _check_total(files, total)
        metadata, differing = _merged_metadata(files)
    except BaseException:
        for file in files:
            file.source.close()
        raise
    return Catalog(
        tensors_of(files),
        metadata=metadata,
        headers=headers_of({name: lambda: raw, **{file.name: file.raw for file in files}}),
        sources=tuple(file.source for file in files),
        notes=(*notes, *differing),
    )


def unlisted_files(store: Store) -> frozenset[str]:
    """Return the weight files that a folder's index does not list; empty unless there is exactly one index.

    Raises the ``FormatError`` of ``read_sharded``.
    """
    names = store.names()
    indexes = [name for name in names if name.lower().endswith(INDEX_SUFFIX)]
    if len(indexes) != 1:
        return frozenset()
    raw = store.read(indexes[0], MAX_INDEX, "safetensors.index-length")
    _require_room(store, indexes[0], len(raw))
    listed = set(_parse(raw, indexes[0])[0].values())
    return frozenset(name for name in names if name.lower().endswith(SUFFIX) and name not in listed)


def _require_room(store: Store, name: str, size: int) -> None:
    """Raise an error, before parsing, if a large index names more tensors than the headers of the files can.

    Both name every tensor. Besides the name, an entry has at most 300 bytes in an index and at least 50 in a header.
    """
    if size <= _SMALL:
        return
    room = 0
    for file_name in store.names():
        source = store.open(file_name)
        try:
            length = int.from_bytes(read_bytes(source, 0, min(PREFIX, source.size)), "little")
            room += length if length <= min(source.size, MAX_HEADER) else 0
        finally:
            source.close()
    if size > _SMALL + 8 * room:
        raise FormatError(
            "safetensors.index-length",
            f"expected at most {_SMALL + 8 * room} bytes for files whose headers have {room}, found {size}",
            where=name,
        )


@preload
class _Index(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    weight_map: dict[str, str]
    metadata: dict[str, str | int | float] = {}


_INDEX = msgspec.json.Decoder(_Index)
_MINUS_ZERO = re.compile(rb":\s*-0")


def _parse_typical(raw: bytes) -> dict[str, Any] | None:
    """Return an index in the usual form; None if it needs the strict parser.

    No key is repeated if the number of colons equals the number of keys plus the colons within texts. An escaped colon
    would make this count wrong.
    """
    if b"\\u003" in raw or _MINUS_ZERO.search(raw):
        return None
    try:
        index = _INDEX.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    texts = (index.weight_map, index.weight_map.values(), index.metadata, map(str, index.metadata.values()))
    keys = len(index.weight_map) + len(index.metadata) + (2 if b'"metadata"' in raw else 1)
    if raw.count(b":") != keys + sum("".join(text).count(":") for text in texts):
        return None
    return {"weight_map": index.weight_map, "metadata": index.metadata}


def _parse(raw: bytes, location: str) -> tuple[dict[str, str], int | None]:
    index = _parse_typical(raw) or strict_json(
        raw, "safetensors.index-json", "safetensors.index-duplicate-key", location
    )
    weight_map, metadata = index.get("weight_map"), index.get("metadata", {})
    if not isinstance(weight_map, dict) or not isinstance(metadata, dict):
        raise FormatError(
            "safetensors.index-fields", "expected an object 'weight_map' and an object 'metadata'", where=location
        )
    invalid = next((tensor for tensor, shard in weight_map.items() if not isinstance(shard, str)), None)
    if invalid is not None:
        raise FormatError("safetensors.index-fields", f"expected a file name for {invalid[:200]!r}", where=location)
    for shard in set(weight_map.values()):
        if shard in ("", ".", "..") or any(character in shard for character in "/\\\0"):
            raise FormatError(
                "safetensors.index-escape",
                f"expected the name of a file in the folder of the index, found {shard[:200]!r}",
                where=location,
            )
    total = metadata.get("total_size")
    return weight_map, int(total) if isinstance(total, int | float) and abs(total) < 2**63 else None


def _check_against(files: Sequence[File], weight_map: Mapping[str, str], location: str) -> list[tuple[str, str]]:
    """Compare the index with the headers of the shards; return pairs of rule and message.

    A tensor that is only in a header is kept, so that no weights are lost. Raises ``FormatError``.
    """
    shard_of: dict[str, str] = {}
    for file in files:
        for tensor in file.header.entries:
            if tensor in shard_of:
                raise FormatError(
                    "safetensors.index-duplicate-tensor",
                    f"{tensor[:200]!r} is in {shard_of[tensor]} and {file.name}",
                    where=location,
                )
            shard_of[tensor] = file.name
    for tensor, shard in weight_map.items():
        if shard_of.get(tensor) != shard:
            raise FormatError(
                "safetensors.index-missing-tensor",
                f"expected {tensor[:200]!r} in {shard}, but that file has no tensor of this name",
                where=location,
            )
    unlisted = [tensor for tensor in shard_of if tensor not in weight_map]
    if not unlisted:
        return []
    return [
        (
            "safetensors.index-unlisted",
            f"{len(unlisted)} tensors are in the shards and not in the index: {unlisted[0]}, ...",
        )
    ]


def _check_total(files: Sequence[File], total: int | None) -> list[tuple[str, str]]:
    """Return a note if ``total_size`` is wrong.

    This is no error, because writers count tied tensors differently.
    """
    real = sum(file.source.size - file.start for file in files)
    if total is None or total == real:
        return []
    return [("safetensors.index-total-size", f"metadata.total_size is {total}, the tensors have {real} bytes")]


def _merged_metadata(files: Sequence[File]) -> tuple[dict[str, str], list[tuple[str, str]]]:
    merged: dict[str, str] = {}
    notes = []
    for file in files:
        for key, value in file.header.metadata.items():
            if key != KEY and merged.setdefault(key, value) != value:
                notes.append(
                    ("safetensors.metadata-differs", f"{file.name} has another {key[:200]!r} than the first shard")
                )
    return merged, notes


def split(specs: Sequence[TensorSpec], max_shard: int | None, carrier: Carrier) -> list[Sequence[TensorSpec]]:
    """Divide tensors into shards as ``huggingface_hub.split_state_dict_into_shards_factory`` does.

    Tensors keep their order. A tensor of more than ``max_shard`` bytes has a separate shard. Any other tensor joins the
    current shard, or begins the next shard if it would exceed the limit.
    """
    if max_shard is None:
        return [specs]
    if max_shard < 1:
        raise UsageError(f"expected shards of at least one byte, found {max_shard}", rule="safetensors.max-shard")
    shards: list[Sequence[TensorSpec]] = []
    current: list[TensorSpec] = []
    filled = 0
    for spec in specs:
        size = tensor_bytes(spec, carrier)
        if size > max_shard:
            shards.append([spec])
            continue
        if filled + size > max_shard:
            shards.append(current)
            current = []
            filled = 0
        current.append(spec)
        filled += size
    if current or not shards:
        shards.append(current)
    return shards


def shard_names(name: str, count: int) -> list[str]:
    """Return the names of the files: ``name`` for a single file, else ``stem-00001-of-0000N.safetensors``."""
    if count == 1:
        return [name]
    stem = name.removesuffix(INDEX_SUFFIX).removesuffix(SUFFIX)
    return [f"{stem}-{index:05d}-of-{count:05d}{SUFFIX}" for index in range(1, count + 1)]


def index_name(name: str) -> str:
    """Return the name of the index for an artifact whose single file would have the name ``name``."""
    return name.removesuffix(INDEX_SUFFIX).removesuffix(SUFFIX) + INDEX_SUFFIX


def encode_index(shards: Sequence[Sequence[TensorSpec]], names: Sequence[str], carrier: Carrier) -> bytes:
    """Return the index as Hugging Face writes it: sorted keys, two spaces, a newline at the end."""
    weight_map = {
        entry.key: name
        for shard, name in zip(shards, names, strict=True)
        for spec in shard
        for entry in carrier.file_entries(spec)
    }
    total = sum(tensor_bytes(spec, carrier) for shard in shards for spec in shard)
    index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
