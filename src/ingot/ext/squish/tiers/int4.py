"""Add four-bit forms to the eight-bit tensors of a Squish directory, in place (Squish Architecture, section 4)."""

from __future__ import annotations

import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ingot.artifacts.open import Source, open_source
from ingot.codecs.base import Encoder
from ingot.codecs.resolve_range import RULE as UNDERFLOW
from ingot.codecs.resolve_range import resolve_range
from ingot.codecs.table import CODECS
from ingot.conversion.candidates import first_values
from ingot.core.files.merge_staging import MergeStaging
from ingot.core.options import takes
from ingot.core.runtime.progress import Progress
from ingot.engine.execute import Target, execute
from ingot.engine.resources import Resources
from ingot.engine.steps import ENCODED, Encode
from ingot.engine.work import Plan, encoded_spec
from ingot.errors import UnsupportedError, UsageError
from ingot.ext.squish.npydir import sidecar
from ingot.ext.squish.npydir.added import AddedForms, encode_sidecar_without
from ingot.ext.squish.npydir.format import NpydirFormat
from ingot.ext.squish.npydir.names import FOLDER, INT4_READY, MANIFEST, MAX_MANIFEST, SIDECAR, file_of
from ingot.ext.squish.npydir.sidecar import Sidecar
from ingot.ext.squish.tiers.directory import Directory, resumed
from ingot.ext.squish.tiers.options import Int4Options
from ingot.formats.base import WriteOptions
from ingot.model.layouts.affine import CODES, AffineLayout, Constant
from ingot.model.store import Store
from ingot.model.tensor import Tensor
from ingot.reporting.report import Bytes, Figure, Line, Report, Seconds, figures_of
from ingot.reporting.reportable import Reportable
from ingot.stores.location import Location

GROUP, MIN_GROUP, MAX_GROUP = 32, 4, 1024
"""Number of columns that share a scale: default, minimum, maximum."""

FOUR_BIT_SUFFIXES: Mapping[str, tuple[str, ...]] = {"q4a": ("q4a", "s4a", "z4a"), "q4": ("q4", "s4")}
"""Suffixes of the arrays of each four-bit form."""

_OPTIONS: Mapping[str, Mapping[str, object]] = {
    "q4a": {"symmetric": False, "zero_kind": "offset"},
    "q4": {"symmetric": True, "zero_point": 7},
}
_INT8 = ("q", "s")


@dataclass(frozen=True, slots=True)
class Int4Report(Reportable):
    """The result of ``add_int4``: the tensors by treatment, and the sizes of both forms.

    ``converted`` are the tensors that got a four-bit form now. ``unchanged`` are tensors that stay at eight bits,
    because no group size divides their columns. ``int8_bytes`` and ``int4_bytes`` are the sizes of the files of both
    forms, for tensors that have both. ``dropped`` states whether their eight-bit files were removed. ``resumed`` is the
    number of tensors that an interrupted run had written.
    """

    path: str
    form: str
    group: int
    scales: str
    converted: list[str]
    unchanged: list[str]
    int8_bytes: Bytes
    int4_bytes: Bytes
    dropped: bool
    seconds: Seconds
    resumed: int = 0

    @property
    def savings_pct(self) -> float:
        """Percentage by which the four-bit files are smaller than the eight-bit files."""
        return 100 * (1 - self.int4_bytes / self.int8_bytes) if self.int8_bytes else 0.0

    def report(self) -> Report:
        """Return all figures as a ``Report``."""
        figures = [
            *figures_of(self, "savings_pct"),
            Figure("count", len(self.converted), "count", data=False),
            Figure("stay", len(self.unchanged), "count", data=False),
            Figure("less", self.savings_pct / 100, "ratio", data=False),
        ]
        gone = ", eight bits removed" if self.dropped else ""
        words = "{path}: {count} tensors got 4 bits, {stay} stay at 8; {int8_bytes} -> {int4_bytes} ({less} less)"
        return Report(figures, [Line(words + gone)])


@dataclass(frozen=True, slots=True)
class _Planned:
    """The plan of adding four-bit arrays to a directory.

    ``keys`` maps the tensors that have both forms afterwards to their safe keys. ``added`` does the same for the
    tensors that get a four-bit form now. ``unchanged`` are the tensors that stay at eight bits. ``int8_size`` and
    ``int4_size`` are the sizes in bytes of the files of both forms afterwards.
    """

    plan: Plan
    keys: Mapping[str, str]
    added: Mapping[str, str]
    unchanged: list[str]
    int8_size: int
    int4_size: int


@takes(Int4Options, "int4")
def add_int4(options: Int4Options) -> Int4Report:
    """Add four-bit arrays to every eight-bit tensor of a Squish directory, then mark them as complete.

    When all files are written, they are renamed to their final names one by one, ``.squish_int4_ready`` last. Until
    then every reader uses the eight-bit form. After an interruption the next run continues. Tiers that were built from
    the directory become stale.

    Returns
    -------
    Int4Report

    Raises
    ------
    UsageError
        ``int4.not-npydir``: another format; ``int4.nothing``: no tensor has eight or four bits; ``int4.group``: not a
        power of two from 4 to 1024; ``int4.other-form``: a tensor has another four-bit form.
    FormatError, IntegrityError, CodecError, ResourceError
        The directory is damaged or cannot be written to.
    """
    started = time.perf_counter()
    _require_group(options)
    location = Location.parse(options.path)
    directory = Directory(location)
    with directory.locked():
        planned, resumed_count = resumed(
            lambda resume: _add(directory.join(resume=resume), location, options),
            lambda: directory.join(resume=False).discard(),
        )
        if options.drop_int8:
            _drop(directory, planned.keys)
    return Int4Report(
        directory.location,
        options.form or "q4a",
        options.group or GROUP,
        options.scales or "f32",
        [*planned.added],
        planned.unchanged,
        planned.int8_size,
        planned.int4_size,
        options.drop_int8,
        time.perf_counter() - started,
        resumed_count,
    )


def _add(staging: MergeStaging, location: Location, options: Int4Options) -> tuple[_Planned, int]:
    """Write the missing four-bit forms; return the plan, and the number of tensors that an earlier run had written."""
    with staging:
        source = open_source(location, io="pread")
        try:
            planned = _plan(source, options)
            if not planned.plan.steps:
                return planned, 0
            progress = Progress(planned.plan.in_bytes, options.progress)
            resources = Resources(options.max_ram, options.threads, progress)
            executed = execute(planned.plan, (source,), Target(staging, FOLDER), resources)
        finally:
            source.close()
    return planned, executed.resumed


def _require_group(options: Int4Options) -> None:
    group = GROUP if options.group is None else options.group
    if not MIN_GROUP <= group <= MAX_GROUP or group & (group - 1):
        raise UsageError(
            f"expected a power of two from {MIN_GROUP} to {MAX_GROUP} as group, found {group}", rule="int4.group"
        )


def _plan(source: Source, options: Int4Options) -> _Planned:
    if not isinstance(source.format, NpydirFormat):
        raise UsageError(
            "expected a Squish directory, "
            f"found {source.format.name}; make one with `ingot convert SRC DIR --format npydir`",
            rule="int4.not-npydir",
            where=source.location,
        )
    steps = []
    unchanged = []
    keys_by_name = {}
    for tensor in source.catalog.tensors.values():
        if tensor.codec != AffineLayout.codec:
            continue
        keys_by_name[tensor.name] = tensor.parts[CODES].where.removeprefix(f"{FOLDER}/").rpartition("__")[0]
        layout = AffineLayout.from_tensor(tensor)
        if layout.bits != 8:
            _require_requested(tensor, layout, options)
            continue
        step = _step(tensor, layout, options)
        if step is None:
            unchanged.append(tensor.name)
        else:
            steps.append(step)
    if not steps and not _four_bits(source.store):
        raise UsageError("the directory has no tensor of eight bits", rule="int4.nothing", where=source.location)
    added = {step.spec.name: keys_by_name[step.spec.name] for step in steps}
    manifest = source.store.read(MANIFEST, MAX_MANIFEST, "npydir.manifest-length")
    format = AddedForms(added, _sidecar(source.store), manifest, source.store)
    plan = Plan(steps, format, {}, WriteOptions(), measured=False)
    names = set(source.store.names(FOLDER))
    four_bit_files = {
        name: _four_bit_suffixes(names, key) for name, key in keys_by_name.items() if f"{key}__q.npy" in names
    }
    keys = {name: key for name, key in keys_by_name.items() if name in added or four_bit_files.get(name)}
    int8 = [file_of(key, suffix) for key in keys.values() for suffix in _INT8]
    int4 = [file_of(key, suffix) for name, key in keys.items() if name not in added for suffix in four_bit_files[name]]
    int8_size = _size(source.store, int8)
    int4_size = _size(source.store, int4) + plan.size
    return _Planned(plan, keys, added, unchanged, int8_size, int4_size)


def _four_bits(store: Store) -> bool:
    """Return whether the directory has four-bit arrays, or the sentinel that marks them as complete."""
    return store.exists(INT4_READY) or any(name.endswith("__q4a.npy") for name in store.names(FOLDER))


def _require_requested(tensor: Tensor, layout: AffineLayout, options: Int4Options) -> None:
    """Refuse a tensor whose four-bit form differs from the requested options."""
    if layout.bits != 4:
        return
    storage_form = "q4" if isinstance(layout.zero, Constant) else "q4a"
    group = _group(layout.matrix_of(tensor.shape)[1], options)
    requested = (
        options.form or storage_form,
        group if options.group else layout.group_size,
        options.scales or layout.scales,
    )
    stored = (storage_form, layout.group_size, layout.scales)
    if requested != stored:
        raise UsageError(
            f"expected the requested four-bit form {requested} (form, group, scales), found {stored}: if the eight-bit "
            f"arrays still exist, remove {INT4_READY} and the files tensors/*__{storage_form}.npy with their scales",
            rule="int4.other-form",
            where=tensor.name,
        )


def _group(cols: int, options: Int4Options) -> int | None:
    """Return the number of columns that share a scale in rows of ``cols`` columns.

    It is the requested number if that divides the columns, else the largest smaller power of two that divides them.
    Returns None if it would be below ``MIN_GROUP``.
    """
    group = options.group or GROUP
    while group >= MIN_GROUP:
        if cols % group == 0:
            return group
        group //= 2
    return None


def _step(tensor: Tensor, layout: AffineLayout, options: Int4Options) -> Encode | None:
    """Return the step that encodes a tensor to four bits; None if no group size divides its columns.

    The tensor is decoded to f32, in the shape of the matrix of its codes.
    """
    rows, cols = layout.matrix_of(tensor.shape)
    group = _group(cols, options)
    if group is None:
        return None
    matrix = replace(
        tensor,
        shape=(rows, cols),
        dtype="f32",
        params=replace(layout, matrix=None, dtype="f32").attributes(),
        decoder=CODECS[AffineLayout.codec],
    )
    encoder_options: dict[str, Any] = {
        "bits": 4,
        "group": group,
        **_OPTIONS[options.form or "q4a"],
        "scales": options.scales or "f32",
    }
    if options.quantizer == "mse" or not encoder_options["symmetric"]:
        encoder_options["quantizer"] = options.quantizer
    try:
        return _encode(matrix, encoder_options)
    except UnsupportedError as error:
        if error.rule != UNDERFLOW:
            raise
    return _encode(matrix, {**encoder_options, "scales": "f32"})


def _encode(matrix: Tensor, encoder_options: Mapping[str, Any]) -> Encode:
    codec = CODECS[AffineLayout.codec]

    def build_encoder(options: Mapping[str, Any]) -> Encoder:
        return codec.encoder(matrix.shape, matrix.dtype, options)

    if encoder_options["scales"] != "f32":
        resolve_range(
            build_encoder(encoder_options), build_encoder, encoder_options, first_values(matrix)
        )  # refuses what is too small for the scales
    encoder = build_encoder(encoder_options)
    spec = encoded_spec(matrix.name, matrix, encoder, "raw")
    return Encode(matrix, spec, ENCODED, "int4", exact=False, encoder=encoder, options=encoder_options)


def _sidecar(store: Store) -> Sidecar | None:
    if not store.exists(SIDECAR):
        return None
    return sidecar.parse(store.read(SIDECAR, MAX_MANIFEST, "npydir.manifest-length"))


def _four_bit_suffixes(names: Container[str], key: str) -> tuple[str, ...]:
    """Return the suffixes of the complete four-bit form that readers prefer; empty if the tensor has none."""
    for suffixes in FOUR_BIT_SUFFIXES.values():
        if all(f"{key}__{suffix}.npy" in names for suffix in suffixes):
            return suffixes
    return ()


def _size(store: Store, names: Sequence[str]) -> int:
    return sum(store.stat(name).size for name in names)


def _drop(directory: Directory, keys: Mapping[str, str]) -> None:
    """Remove the eight-bit arrays of the tensors ``keys``.

    Their entries in ``ingot.json`` are removed first, then codes, and scales last, because readers ignore scales
    without codes.
    """
    sidecar_before = _sidecar(directory)
    if sidecar_before is not None:
        manifest = directory.read(MANIFEST, MAX_MANIFEST, "npydir.manifest-length")
        directory.write(SIDECAR, encode_sidecar_without(sidecar_before, manifest, dict.fromkeys(keys, _INT8)))
    for suffix in _INT8:
        directory.remove(*(file_of(key, suffix) for key in keys.values()))
