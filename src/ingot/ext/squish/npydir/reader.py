"""Reading a Squish directory: manifest, ``ingot.json``, the header of every array, which form of a tensor is taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ingot.core.bytes import checksums
from ingot.core.parsing import manifest_digest
from ingot.core.parsing.strictjson import strict_json
from ingot.core.runtime.gcpause import gc_paused
from ingot.errors import FormatError
from ingot.ext.squish.npydir.arrays import Array, Group, extra_file, foreign, list_arrays, open_arrays
from ingot.ext.squish.npydir.forms import FORMS, Form, choose, tensor_of
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
from ingot.formats.base import Catalog
from ingot.model.bytesource import ByteSource
from ingot.model.layouts.affine import AffineLayout
from ingot.model.store import Listed, Store
from ingot.model.tensor import Tensor

# Bytes of a manifest that cost next to nothing to parse, and the most that one tensor takes in it.
_SMALL, _PER_TENSOR = 1 << 20, 4096
_MOST_PROGRESS = 16 << 20


@dataclass(slots=True)
class _Reading:
    """What has been found so far."""

    store: Store
    verify: bool
    int4_ready: bool
    headers: dict[str, bytes] = field(default_factory=dict)
    sources: list[ByteSource] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)


def read_catalog(store: Store, *, verify: bool = True) -> Catalog:
    """Validate a directory completely and locate every tensor; no weights are read.

    Raises ``FormatError``, ``IntegrityError`` and ``UnsupportedError`` with the rules of spec/npydir.md.
    """
    store = Listed(store)
    _require_finished(store)
    raw = store.read(MANIFEST, MAX_MANIFEST, "npydir.manifest-length")
    with gc_paused():
        groups, others = list_arrays(store)
        _require_files(len(raw), len(groups))
        pairs = parse_manifest(raw, groups, MANIFEST)
        reading = _Reading(store, verify, store.exists(INT4_READY), {MANIFEST: raw})
        sidecar = _sidecar(store, pairs, reading)
        known = set(pairs.values())
        for key, group in groups.items():
            if key not in known:
                raise extra_file(next(iter(group.paths.values()), f"{FOLDER}/{key}"), "one of no tensor")
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
            f"expected tensors, or {READY}, which marks a directory of none as finished; found neither",
            where=MANIFEST,
        )
    unmarked = ("npydir.unmarked", f"{READY}, which marks a directory as finished, is not there")
    return Catalog(
        tensors=tensors,
        metadata=sidecar.metadata if sidecar else {},
        headers=reading.headers,
        sources=tuple(reading.sources),
        notes=tuple(_notes(others, reading)),
        remarks=() if marked else (unmarked,),  # section 4 of the document does not have it
        manifest_digest=sidecar is not None and sidecar.digest is not None,
    )


def _require_finished(store: Store) -> None:
    """Refuse what squish's program has left of a run that did not end: the manifest names the first shards' tensors."""
    if not store.exists(PROGRESS):
        return
    raw = store.read(PROGRESS, _MOST_PROGRESS, "npydir.progress")
    noted = strict_json(raw, "npydir.progress", "npydir.progress", PROGRESS)
    done, total = noted.get("completed_shards"), noted.get("total_shards")
    if not isinstance(done, list) or not isinstance(total, int) or isinstance(total, bool):
        raise FormatError("npydir.progress", "expected completed_shards and total_shards, found others", where=PROGRESS)
    if len(done) < total:
        raise FormatError(
            "npydir.unfinished",
            f"expected all {total} shards of the model, found {len(done)}: squish was interrupted; let it compress the "
            "model again",
            where=PROGRESS,
        )


def _require_files(size: int, groups: int) -> None:
    """Refuse a manifest that names more tensors than there are files of, before it is parsed.

    A tensor's name is no longer than its key, which is that of a file: 255 bytes, six times as many where escaped.
    """
    most = _SMALL + groups * _PER_TENSOR
    if size > most:
        raise FormatError(
            "npydir.manifest-length",
            f"expected at most {most} bytes for the {groups} tensors in {FOLDER}, found {size}",
            where=MANIFEST,
        )


def _tensor(name: str, group: Group, entry: Entry | None, reading: _Reading) -> Tensor:
    form = choose(group, int4_ready=reading.int4_ready)
    if form is None:
        raise _nothing(group)
    for suffix in entry.digests if entry else ():
        if suffix not in group.paths:
            raise FormatError(
                "npydir.missing-file",
                f"expected this file, which {SIDECAR} names, found none: the directory is incomplete",
                where=file_of(group.key, suffix),
            )
    tensor = _form_of(name, form, group, entry, reading)
    _check_sentinel(tensor, form, group, reading)
    for other in FORMS:
        if other.in_group(group) and not set(other.suffixes) <= set(form.suffixes):
            _check_other(tensor, other, group, entry, reading)
    reading.unused += [f"{group.key}: {what}" for what in group.foreign.values()]
    return tensor


def _form_of(name: str, form: Form, group: Group, entry: Entry | None, reading: _Reading) -> Tensor:
    suffixes = form.suffixes
    if form.bits and ("shape" in group.paths or form.bits == 3):
        suffixes = (*suffixes, "shape")
    arrays = open_arrays(reading.store, group, suffixes)
    for suffix, array in arrays.items():
        if entry is not None and suffix in entry.heads and reading.verify:
            _check_head(array, entry.heads[suffix])
        if array.name not in reading.headers:
            reading.headers[array.name] = array.head
            reading.sources.append(array.source)
    tensor = tensor_of(name, form, arrays, entry, reading.verify)
    if "shape" in arrays:  # its values decide too, so they are part of what the directory is known by
        reading.headers[arrays["shape"].name] += repr(tensor.shape).encode()
    return tensor


def _check_head(array: Array, stated: str) -> None:
    """Check an array's header against the digest that ``ingot.json`` has of it."""
    algorithm = checksums.known(stated, "npydir.head-digest", array.name)
    if algorithm is not None:
        checksums.check(stated, checksums.digest(algorithm, array.head), "npydir.head-digest", array.name)


def _check_other(tensor: Tensor, form: Form, group: Group, entry: Entry | None, reading: _Reading) -> None:
    """Check a form that is there and not taken; an unfinished one is only told."""
    if form.bits == 4 and "q" in group.paths and not reading.int4_ready:
        reading.unused.append(f"{group.key}: four bits, not marked as complete by {INT4_READY}")
        return
    if any(suffix not in group.paths for suffix in form.suffixes):
        reading.unused.append(f"{group.key}: {form.name}, of which arrays are missing")
        return
    other = _form_of(tensor.name, form, group, entry, reading)
    if other.shape != tensor.shape:
        raise FormatError(
            "npydir.forms-differ",
            f"expected {list(tensor.shape)} as in the tensor's other form, found {list(other.shape)}",
            where=group.paths[form.suffixes[0]],
        )


def _check_sentinel(tensor: Tensor, form: Form, group: Group, reading: _Reading) -> None:
    """Refuse a directory that is marked as complete at four bits where a tensor that could be is not."""
    if reading.int4_ready and form.bits == 8 and AffineLayout.of(tensor).matrix_of(tensor.shape)[1] % 4 == 0:
        raise FormatError(
            "npydir.sentinel",
            f"{INT4_READY} says that four-bit forms are complete, and this one is missing: remove the sentinel, or "
            "build them again",
            where=file_of(group.key, "q4a"),
        )


def _nothing(group: Group) -> Exception:
    if group.foreign:
        return foreign(group, next(iter(group.foreign)))
    missing = [form.suffixes[0] for form in FORMS if any(suffix in group.paths for suffix in form.suffixes)]
    return FormatError(
        "npydir.missing-file",
        "expected the arrays of a tensor of the manifest, found none: the directory is incomplete",
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
        odd = min(set(sidecar.tensors) ^ set(pairs))
        raise FormatError(
            "npydir.sidecar-tensors",
            f"expected the tensors of {MANIFEST}, found {odd[:200]!r} in only one of them; remove {SIDECAR} if the "
            "directory was written again by another program",
            where=SIDECAR,
        )
    return sidecar


def _notes(others: list[str], reading: _Reading) -> Iterator[tuple[str, str]]:
    """Yield what is allowed but worth a note."""
    if others:
        yield "npydir.other-file", f"{len(others)} files in {FOLDER}/ are no arrays, such as {others[0][:80]!r}"
    if reading.unused:
        yield "npydir.unused-form", f"{len(reading.unused)} forms are not used, such as {reading.unused[0][:160]}"
