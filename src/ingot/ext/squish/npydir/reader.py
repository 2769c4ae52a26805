"""Read the manifest, ``ingot.json`` and array headers of a Squish directory, and choose each tensor's storage form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ingot.core.bytes import checksums
from ingot.core.parsing import manifest_digest
from ingot.core.parsing.strictjson import strict_json
from ingot.core.runtime.memory import gc_paused
from ingot.errors import FormatError
from ingot.ext.squish.npydir.arrays import Array, Group, extra_file, foreign_form_error, list_arrays, open_arrays
from ingot.ext.squish.npydir.names import (
    FOLDER,
    INT4_READY,
    MANIFEST,
    MAX_MANIFEST,
    PROGRESS,
    READY,
    SIDECAR,
    file_of,
    parse_manifest,
)
from ingot.ext.squish.npydir.sidecar import Entry, Sidecar
from ingot.ext.squish.npydir.sidecar import parse as parse_sidecar
from ingot.ext.squish.npydir.storage_forms import STORAGE_FORMS, StorageForm, choose, tensor_of
from ingot.formats.base import Catalog
from ingot.model.bytesource import ByteSource
from ingot.model.layouts.affine import AffineLayout
from ingot.model.store import CachedStore, Store
from ingot.model.tensor import Tensor

# Size in bytes of a manifest that is always parsed, and the size that each tensor may add to it.
_SMALL = 1 << 20
_PER_TENSOR = 4096
_MAX_PROGRESS = 16 << 20


@dataclass(slots=True)
class _Reading:
    """The state of reading a directory: its store and options, and the headers and sources opened so far.

    ``unused`` are descriptions of storage forms that are not read.
    """

    store: Store
    verify: bool
    int4_ready: bool
    headers: dict[str, bytes] = field(default_factory=dict)
    sources: list[ByteSource] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)


def read_catalog(store: Store, *, verify: bool = True) -> Catalog:
    """Validate a directory completely and return its tensors; weights are not read.

    Raises ``FormatError``, ``IntegrityError`` and ``UnsupportedError`` with the rules of spec/npydir.md.
    """
    store = CachedStore(store)
    _require_finished(store)
    raw = store.read(MANIFEST, MAX_MANIFEST, "npydir.manifest-length")
    with gc_paused():
        groups, other_files = list_arrays(store)
        _require_files(len(raw), len(groups))
        pairs = parse_manifest(raw, groups, MANIFEST)
        reading = _Reading(store, verify, store.exists(INT4_READY), {MANIFEST: raw})
        sidecar = _sidecar(store, pairs, reading)
        keys = set(pairs.values())
        for key, group in groups.items():
            if key not in keys:
                raise extra_file(
                    next(iter(group.paths.values()), f"{FOLDER}/{key}"),
                    "an array of a tensor that is not in the manifest",
                )
        try:
            tensors = {
                name: _tensor(
                    name, groups.get(key) or Group(key), sidecar.tensors.get(name) if sidecar else None, reading
                )
                for name, key in pairs.items()
            }
        except BaseException:
            for source in reading.sources:
                source.close()
            raise
    marked = store.exists(READY)
    if not tensors and not marked:
        raise FormatError(
            "npydir.empty",
            f"expected tensors, or {READY}, which marks a directory without tensors as finished; found neither",
            where=MANIFEST,
        )
    unmarked = ("npydir.unmarked", f"{READY}, which marks a directory as finished, does not exist")
    return Catalog(
        tensors=tensors,
        metadata=sidecar.metadata if sidecar else {},
        headers=reading.headers,
        sources=tuple(reading.sources),
        notes=tuple(_notes(other_files, reading)),
        remarks=() if marked else (unmarked,),  # section 4 of squish's document does not mention the sentinel
        manifest_digest=sidecar is not None and sidecar.digest is not None,
    )


def _require_finished(store: Store) -> None:
    """Raise an error if squish's program did not finish the directory; its manifest then lacks tensors of later
    shards.
    """
    if not store.exists(PROGRESS):
        return
    raw = store.read(PROGRESS, _MAX_PROGRESS, "npydir.progress")
    progress = strict_json(raw, "npydir.progress", "npydir.progress", PROGRESS)
    completed = progress.get("completed_shards")
    total = progress.get("total_shards")
    if not isinstance(completed, list) or not isinstance(total, int) or isinstance(total, bool):
        raise FormatError("npydir.progress", "expected completed_shards and total_shards, found others", where=PROGRESS)
    if len(completed) < total:
        raise FormatError(
            "npydir.unfinished",
            f"expected all {total} shards of the model, found {len(completed)}: squish was interrupted; let it "
            "compress the model again",
            where=PROGRESS,
        )


def _require_files(size: int, groups: int) -> None:
    """Raise an error if a manifest is too large for the number of tensors with files; called before it is parsed.

    A tensor's name is no longer than its safe key. The key is part of a file name, so it has at most 255 bytes. JSON
    escapes can make the name six times longer.
    """
    max_size = _SMALL + groups * _PER_TENSOR
    if size > max_size:
        raise FormatError(
            "npydir.manifest-length",
            f"expected at most {max_size} bytes for the {groups} tensors in {FOLDER}, found {size}",
            where=MANIFEST,
        )


def _tensor(name: str, group: Group, entry: Entry | None, reading: _Reading) -> Tensor:
    storage = choose(group, int4_ready=reading.int4_ready)
    if storage is None:
        raise _missing_form_error(group)
    for suffix in entry.digests if entry else ():
        if suffix not in group.paths:
            raise FormatError(
                "npydir.missing-file",
                f"expected this file, because {SIDECAR} names it, but it does not exist: the directory is incomplete",
                where=file_of(group.key, suffix),
            )
    tensor = _read_form(name, storage, group, entry, reading)
    _check_sentinel(tensor, storage, group, reading)
    for unused_form in STORAGE_FORMS:
        if unused_form.in_group(group) and not set(unused_form.suffixes) <= set(storage.suffixes):
            _check_other(tensor, unused_form, group, entry, reading)
    reading.unused += [f"{group.key}: {description}" for description in group.foreign.values()]
    return tensor


def _read_form(name: str, storage: StorageForm, group: Group, entry: Entry | None, reading: _Reading) -> Tensor:
    suffixes = storage.suffixes
    if storage.bits and ("shape" in group.paths or storage.bits == 3):
        suffixes = (*suffixes, "shape")
    arrays = open_arrays(reading.store, group, suffixes)
    for suffix, array in arrays.items():
        if entry is not None and suffix in entry.heads and reading.verify:
            _check_header(array, entry.heads[suffix])
        if array.name not in reading.headers:
            reading.headers[array.name] = array.head
            reading.sources.append(array.source)
    tensor = tensor_of(name, storage, arrays, entry, reading.verify)
    if "shape" in arrays:  # the shape is part of the directory's identity
        reading.headers[arrays["shape"].name] += repr(tensor.shape).encode()
    return tensor


def _check_header(array: Array, expected: str) -> None:
    """Check an array's header against its digest in ``ingot.json``."""
    algorithm = checksums.algorithm_of(expected, "npydir.head-digest", array.name)
    if algorithm is not None:
        checksums.check(expected, checksums.digest(algorithm, array.head), "npydir.head-digest", array.name)


def _check_other(tensor: Tensor, other_form: StorageForm, group: Group, entry: Entry | None, reading: _Reading) -> None:
    """Check another storage form of a tensor that was not chosen.

    If it is incomplete, it is added to ``reading.unused`` instead.
    """
    if other_form.bits == 4 and "q" in group.paths and not reading.int4_ready:
        reading.unused.append(f"{group.key}: four bits, not marked as complete by {INT4_READY}")
        return
    if any(suffix not in group.paths for suffix in other_form.suffixes):
        reading.unused.append(f"{group.key}: {other_form.name}, which lacks arrays")
        return
    unused = _read_form(tensor.name, other_form, group, entry, reading)
    if unused.shape != tensor.shape:
        raise FormatError(
            "npydir.forms-differ",
            f"expected {list(tensor.shape)} as in the tensor's other form, found {list(unused.shape)}",
            where=group.paths[other_form.suffixes[0]],
        )


def _check_sentinel(tensor: Tensor, storage: StorageForm, group: Group, reading: _Reading) -> None:
    """Raise an error if four-bit forms are marked as complete, but the tensor has none although it could have one."""
    if (
        reading.int4_ready
        and storage.bits == 8
        and AffineLayout.from_tensor(tensor).matrix_of(tensor.shape)[1] % 4 == 0
    ):
        raise FormatError(
            "npydir.sentinel",
            f"{INT4_READY} marks four-bit forms as complete, and this one is missing: remove the sentinel, or "
            "build the four-bit forms again",
            where=file_of(group.key, "q4a"),
        )


def _missing_form_error(group: Group) -> Exception:
    if group.foreign:
        return foreign_form_error(group, next(iter(group.foreign)))
    missing = [
        storage.suffixes[0] for storage in STORAGE_FORMS if any(suffix in group.paths for suffix in storage.suffixes)
    ]
    return FormatError(
        "npydir.missing-file",
        "the manifest names a tensor whose arrays do not exist: the directory is incomplete; copy or convert it again",
        where=file_of(group.key, missing[0] if missing else "pt"),
    )


def _sidecar(store: Store, pairs: Mapping[str, str], reading: _Reading) -> Sidecar | None:
    if not store.exists(SIDECAR):
        return None
    raw = reading.headers[SIDECAR] = store.read(SIDECAR, MAX_MANIFEST, "npydir.manifest-length")
    sidecar = parse_sidecar(raw)
    if sidecar.digest is not None and reading.verify:
        manifest_digest.check_json(raw, sidecar.digest, SIDECAR, [reading.headers[MANIFEST]])
    if set(sidecar.tensors) != set(pairs):
        unmatched = min(set(sidecar.tensors) ^ set(pairs))
        raise FormatError(
            "npydir.sidecar-tensors",
            f"expected the tensors of {MANIFEST}, found {unmatched[:200]!r} in only one of them; remove {SIDECAR} if "
            "another program has rewritten the directory",
            where=SIDECAR,
        )
    return sidecar


def _notes(other_files: list[str], reading: _Reading) -> Iterator[tuple[str, str]]:
    """Yield notes: rule and message of each fact that is allowed but that the user should know."""
    if other_files:
        yield (
            "npydir.other-file",
            f"{len(other_files)} files in {FOLDER}/ are not arrays, for example {other_files[0][:80]!r}",
        )
    if reading.unused:
        yield (
            "npydir.unused-form",
            f"{len(reading.unused)} storage forms are not used, for example {reading.unused[0][:160]}",
        )
