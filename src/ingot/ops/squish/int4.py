"""Four-bit forms beside the eight-bit ones of a Squish directory, in place (Squish Architecture, section 4)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path

import numpy as np

from ingot.codecs.table import CODECS
from ingot.core import checksums
from ingot.core.atomic import atomic_write, flush
from ingot.core.oserrors import write_error
from ingot.core.parallel import default_workers, ordered
from ingot.core.paths import local_path
from ingot.core.progress import Progress, ProgressCallback
from ingot.errors import UsageError
from ingot.formats.npydir import sidecar
from ingot.formats.npydir.array_file import ArrayFile
from ingot.formats.npydir.format import NpydirFormat
from ingot.formats.npydir.names import FOLDER, INT4_READY, MANIFEST, SIDECAR, file_of, safe_key
from ingot.formats.npydir.sidecar import Entry
from ingot.formats.npydir.writer import head_digest
from ingot.model.layouts.affine import AffineLayout
from ingot.model.report import Bytes, Figure, Line, Report, Seconds, figures_of
from ingot.model.tensor import Array, Tensor
from ingot.ops.open import Source, open_source
from ingot.ops.squish.build import building
from ingot.stores.local import LocalTarget

GROUPS = (32, 16, 8, 4)
"""Columns that share a scale and an offset: the first that divides a tensor's columns."""

_ROLES = {"packed_weight": "q4a", "scales": "s4a", "zeros": "z4a"}
_INT8 = ("q", "s")
_PARTIAL = ".ingot-int4-"
_CHUNK = 1 << 20  # elements that a thread holds at a time


@dataclass(frozen=True, slots=True)
class Int4Report:
    """What was done.

    ``converted`` tensors got a four-bit form now, ``kept`` ones stay at eight bits (columns that no group divides).
    ``int8_bytes`` and ``int4_bytes`` are those of the files of tensors that have both or had both until ``dropped``.
    """

    path: str
    converted: list[str]
    kept: list[str]
    int8_bytes: Bytes
    int4_bytes: Bytes
    dropped: bool
    seconds: Seconds

    @property
    def savings_pct(self) -> float:
        """Percent by which the four-bit files are smaller than the eight-bit ones."""
        return 100 * (1 - self.int4_bytes / self.int8_bytes) if self.int8_bytes else 0.0

    def report(self) -> Report:
        """Return all figures."""
        figures = [
            *figures_of(self, "savings_pct"),
            Figure("count", len(self.converted), "count", data=False),
            Figure("stay", len(self.kept), "count", data=False),
            Figure("less", self.savings_pct / 100, "ratio", data=False),
        ]
        gone = ", eight bits removed" if self.dropped else ""
        words = "{path}: {count} tensors got 4 bits, {stay} stay at 8; {int8_bytes} -> {int4_bytes} ({less} less)"
        return Report(figures, [Line(words + gone)])


@dataclass(frozen=True, slots=True)
class _Plan:
    """One tensor as the matrix of its codes, decoded to f32; what its files are named after; the size of its groups."""

    tensor: Tensor
    key: str
    group: int
    index: int


def add_int4(
    path: str | PathLike[str],
    *,
    drop_int8: bool = False,
    quantizer: str = "mse",
    threads: int | None = None,
    progress: ProgressCallback | None = None,
) -> Int4Report:
    """Write ``__q4a``, ``__s4a`` and ``__z4a`` beside the eight-bit arrays of every tensor, then mark them as complete.

    Codes are 4 bits with an f32 scale and an f32 offset per group of 32 columns (16, 8 or 4 where 32 does not divide
    them). Files appear one by one under their names; ``.squish_int4_ready`` is written last, after everything is on the
    disk, and until then every reader takes the eight-bit form. A run that is killed leaves nothing that counts, and
    the next one gives the same files. Other tiers that were built from the directory are no longer current then.

    Parameters
    ----------
    path : path
        A Squish directory.
    drop_int8 : bool
        Remove the eight-bit arrays of converted tensors afterwards.
    quantizer : {"mse", "minmax"}
        How scales are chosen: by least squared error over clipped ranges, or from the extremes.
    threads : int, optional
    progress : callable, optional

    Returns
    -------
    Int4Report

    Raises
    ------
    UsageError
        ``int4.not-npydir``: another format; ``int4.nothing``: no tensor at eight bits and none at four.
    FormatError, IntegrityError, CodecError, ResourceError
        The directory is damaged or cannot be written to.
    """
    started, folder = time.perf_counter(), local_path(path)
    with building(folder):
        source = open_source(folder, io="pread")
        try:
            plans, kept = _plan(source)
            written = _write(folder, plans, quantizer, threads, progress)
            source.require_unchanged()
        finally:
            source.close()
        _publish(folder, written, plans)
        both = _tensors_with_both(folder)
        if not both and not plans and not (folder / INT4_READY).exists():
            raise UsageError("expected tensors at eight bits, found none", rule="int4.nothing", where=str(folder))
        int8_bytes, int4_bytes = _size(folder, both, _INT8), _size(folder, both, tuple(_ROLES.values()))
        if drop_int8:
            _drop(folder, both)
    names = [plan.tensor.name for plan in plans]
    return Int4Report(str(folder), names, kept, int8_bytes, int4_bytes, drop_int8, time.perf_counter() - started)


def _plan(source: Source) -> tuple[list[_Plan], list[str]]:
    if not isinstance(source.format, NpydirFormat):
        raise UsageError(
            "expected a Squish directory, "
            f"found {source.format.name}; make one with `ingot convert SRC DIR --format npydir`",
            rule="int4.not-npydir",
            where=source.location,
        )
    plans: list[_Plan] = []
    kept: list[str] = []
    for tensor in source.catalog.tensors.values():
        if tensor.codec != AffineLayout.codec or tensor.params["bits"] != 8:
            continue
        rows, cols = tensor.params.get("matrix") or tensor.matrix_shape
        group = next((size for size in GROUPS if cols % size == 0), None)
        if group is None:
            kept.append(tensor.name)
            continue
        params = {key: value for key, value in tensor.params.items() if key != "matrix"}
        key = tensor.parts["packed_weight"].where.removeprefix(f"{FOLDER}/").rpartition("__")[0]
        matrix = replace(tensor, shape=(rows, cols), dtype="f32", params={**params, "dtype": "f32"})
        plans.append(_Plan(matrix, key, group, len(plans)))
    return plans, kept


def _write(
    folder: Path, plans: list[_Plan], quantizer: str, threads: int | None, progress: ProgressCallback | None
) -> list[dict[str, str]]:
    """Write the files of all tensors, each complete under its name; return their digests by suffix."""
    for stale in (folder / FOLDER).glob(f"{_PARTIAL}*"):
        stale.unlink()
    state = Progress(sum(plan.tensor.nbytes for plan in plans), progress)
    work = partial(_quantize, folder, quantizer, state)
    written = list(ordered(work, plans, threads or default_workers()))
    flush(folder / FOLDER)
    return written


def _quantize(folder: Path, quantizer: str, state: Progress, plan: _Plan) -> dict[str, str]:
    """Write one tensor's files beside their final names, then rename them."""
    tensors = folder / FOLDER
    made = {role: tensors / f"{_PARTIAL}{plan.index}__{suffix}.npy" for role, suffix in _ROLES.items()}
    try:
        digests = _encode(plan, quantizer, made)
        for role, suffix in _ROLES.items():
            flush(made[role])
            made[role].replace(folder / file_of(plan.key, suffix))
    except OSError as error:
        raise write_error(error, str(folder)) from error
    finally:
        for path in made.values():
            path.unlink(missing_ok=True)
    state.advance(plan.tensor.nbytes, plan.tensor.name)
    return digests


def _encode(plan: _Plan, quantizer: str, made: Mapping[str, Path]) -> dict[str, str]:
    """Quantize chunk by chunk into the files; return digests of their values by suffix."""
    rows, cols = plan.tensor.matrix_shape
    options = {"bits": 4, "group": plan.group, "symmetric": False, "zero_kind": "offset", "scales": "f32"}
    encoder = CODECS[AffineLayout.codec].encoder((rows, cols), "f32", {**options, "quantizer": quantizer})
    shapes = _shapes(plan)
    files: dict[str, ArrayFile] = {}
    hashers = {role: checksums.hasher("crc32c") for role in _ROLES}
    try:
        for role, path in made.items():
            files[role] = ArrayFile(LocalTarget(path.parent).create(path.name), path.name, *shapes[role])
        reader = CODECS[AffineLayout.codec].reader(plan.tensor)
        step = max(1, _CHUNK // cols)
        for start in range(0, rows, step):
            chunk: Array = np.empty((min(step, rows - start), cols), np.float32)
            reader.read_into(chunk)
            for role, values in encoder.encode(chunk, start).items():
                data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
                files[role].write(data)
                hashers[role].update(data)
        reader.finish()
    except BaseException:
        for file in files.values():
            file.abort()
        raise
    for file in files.values():
        file.close()
    return {suffix: hashers[role].text() for role, suffix in _ROLES.items()}


def _shapes(plan: _Plan) -> dict[str, tuple[str, tuple[int, int]]]:
    """Return element type and shape of each array of a four-bit form, by role."""
    rows, cols = plan.tensor.matrix_shape
    groups = ("f32", (rows, cols // plan.group))
    return {"packed_weight": ("u8", (rows, cols // 2)), "scales": groups, "zeros": groups}


def _publish(folder: Path, written: list[dict[str, str]], plans: list[_Plan]) -> None:
    """Note the digests where there is a place for them, then mark the four-bit forms as complete."""
    if not plans:
        return
    digests = {plan.tensor.name: digest for plan, digest in zip(plans, written, strict=True)}
    heads = {plan.tensor.name: _heads(plan) for plan in plans}

    def with_both(name: str, entry: Entry) -> Entry:
        more = heads[name] if name in heads and entry.heads else {}
        return replace(entry, digests={**entry.digests, **digests.get(name, {})}, heads={**entry.heads, **more})

    _rewrite_sidecar(folder, with_both)
    atomic_write(folder / INT4_READY, b"")


def _heads(plan: _Plan) -> dict[str, str]:
    """Return the digests of the headers of the files that were made for a tensor."""
    shapes = _shapes(plan)
    return {suffix: head_digest("crc32c", *shapes[role]) for role, suffix in _ROLES.items()}


def _rewrite_sidecar(folder: Path, changed: Callable[[str, Entry], Entry]) -> None:
    path = folder / SIDECAR
    if not path.exists():
        return
    content = sidecar.parse(path.read_bytes())
    tensors = {name: changed(name, entry) for name, entry in content.tensors.items()}
    algorithm = content.digest.partition(":")[0] if content.digest else None
    manifest = (folder / MANIFEST).read_bytes()
    atomic_write(path, sidecar.encode(replace(content, tensors=tensors, digest=None), manifest, algorithm))


def _tensors_with_both(folder: Path) -> list[str]:
    """Return what the files of tensors are named after that have a complete four-bit form and an eight-bit one."""
    names = {path.name for path in (folder / FOLDER).iterdir()}
    keys = [name.removesuffix("__q.npy") for name in names if name.endswith("__q.npy")]
    return sorted(key for key in keys if all(f"{key}__{suffix}.npy" in names for suffix in _ROLES.values()))


def _size(folder: Path, keys: list[str], suffixes: tuple[str, ...]) -> int:
    return sum((folder / file_of(key, suffix)).stat().st_size for key in keys for suffix in suffixes)


def _drop(folder: Path, keys: list[str]) -> None:
    """Remove eight-bit arrays: first what names them, then codes, then scales, which alone count for nothing."""
    gone = set(keys)

    def remaining(name: str, entry: Entry) -> Entry:
        dropped = _INT8 if safe_key(name) in gone else ()
        digests = {suffix: text for suffix, text in entry.digests.items() if suffix not in dropped}
        heads = {suffix: text for suffix, text in entry.heads.items() if suffix not in dropped}
        return replace(entry, digests=digests, heads=heads)

    _rewrite_sidecar(folder, remaining)
    try:
        for suffix in _INT8:
            for key in keys:
                (folder / file_of(key, suffix)).unlink(missing_ok=True)
            flush(folder / FOLDER)
    except OSError as error:
        raise write_error(error, str(folder)) from error
