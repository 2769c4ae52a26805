"""Four-bit forms beside the eight-bit ones of a Squish directory, in place (Squish Architecture, section 4)."""

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
from ingot.core.files.joining import Joining
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
from ingot.reporting.shown import Shown
from ingot.stores.location import Location

GROUP, LEAST_GROUP, MOST_GROUP = 32, 4, 1024
"""Columns that share a scale: by default, at least, at most."""

FORMS: Mapping[str, tuple[str, ...]] = {"q4a": ("q4a", "s4a", "z4a"), "q4": ("q4", "s4")}
"""Suffixes of the arrays of each four-bit form."""

_OPTIONS: Mapping[str, Mapping[str, object]] = {
    "q4a": {"symmetric": False, "zero_kind": "offset"},
    "q4": {"symmetric": True, "zero_point": 7},
}
_INT8 = ("q", "s")


@dataclass(frozen=True, slots=True)
class Int4Report(Shown):
    """What was done.

    ``converted`` tensors got a four-bit form now, ``kept`` ones stay at eight bits (columns that no group divides).
    ``int8_bytes`` and ``int4_bytes`` are those of the files of tensors that have both or had both until ``dropped``.
    ``resumed`` tensors were taken over from a run that was killed.
    """

    path: str
    form: str
    group: int
    scales: str
    converted: list[str]
    kept: list[str]
    int8_bytes: Bytes
    int4_bytes: Bytes
    dropped: bool
    seconds: Seconds
    resumed: int = 0

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
class _Planned:
    """The plan of what is added.

    ``keys`` maps the tensors with both forms afterwards to what their files are named after, ``added`` those that get
    the four-bit form now. ``kept`` are the tensors that stay at eight bits. ``int8_size`` and ``int4_size`` are the
    bytes of the files of both forms afterwards.
    """

    plan: Plan
    keys: Mapping[str, str]
    added: Mapping[str, str]
    kept: list[str]
    int8_size: int
    int4_size: int


@takes(Int4Options, "int4")
def add_int4(options: Int4Options) -> Int4Report:
    """Write a four-bit form beside the eight-bit arrays of every tensor, then mark them as complete.

    Files appear one by one under their names once all are made; ``.squish_int4_ready`` is the last, and until then
    every reader takes the eight-bit form. A run that is killed leaves nothing that counts, and the next one goes on
    where it stopped. Other tiers that were built from the directory are no longer current then.

    Returns
    -------
    Int4Report

    Raises
    ------
    UsageError
        ``int4.not-npydir``: another format; ``int4.nothing``: no tensor at eight bits and none at four;
        ``int4.group``: no power of two from 4 to 1024; ``int4.other-form``: four bits are there in another form.
    FormatError, IntegrityError, CodecError, ResourceError
        The directory is damaged or cannot be written to.
    """
    started = time.perf_counter()
    _require_group(options)
    location = Location.parse(options.path)
    directory = Directory(location)
    with directory.locked():
        planned, taken = resumed(
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
        planned.kept,
        planned.int8_size,
        planned.int4_size,
        options.drop_int8,
        time.perf_counter() - started,
        taken,
    )


def _add(staging: Joining, location: Location, options: Int4Options) -> tuple[_Planned, int]:
    """Write the forms of all tensors that have none; return the plan, and how many were taken over."""
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
    if not LEAST_GROUP <= group <= MOST_GROUP or group & (group - 1):
        raise UsageError(
            f"expected a power of two from {LEAST_GROUP} to {MOST_GROUP} as group, found {group}", rule="int4.group"
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
    kept = []
    every = {}
    for tensor in source.catalog.tensors.values():
        if tensor.codec != AffineLayout.codec:
            continue
        every[tensor.name] = tensor.parts[CODES].where.removeprefix(f"{FOLDER}/").rpartition("__")[0]
        layout = AffineLayout.from_tensor(tensor)
        if layout.bits != 8:
            _require_asked(tensor, layout, options)
            continue
        step = _step(tensor, layout, options)
        if step is None:
            kept.append(tensor.name)
        else:
            steps.append(step)
    if not steps and not _four_bits(source.store):
        raise UsageError("expected tensors at eight bits, found none", rule="int4.nothing", where=source.location)
    added = {step.spec.name: every[step.spec.name] for step in steps}
    manifest = source.store.read(MANIFEST, MAX_MANIFEST, "npydir.manifest-length")
    format = AddedForms(added, _sidecar(source.store), manifest, source.store)
    plan = Plan(steps, format, {}, WriteOptions(), measured=False)
    names = set(source.store.names(FOLDER))
    four_bit_files = {name: _four(names, key) for name, key in every.items() if f"{key}__q.npy" in names}
    keys = {name: key for name, key in every.items() if name in added or four_bit_files.get(name)}
    int8 = [file_of(key, suffix) for key in keys.values() for suffix in _INT8]
    int4 = [file_of(key, suffix) for name, key in keys.items() if name not in added for suffix in four_bit_files[name]]
    int8_size = _size(source.store, int8)
    int4_size = _size(source.store, int4) + plan.size
    return _Planned(plan, keys, added, kept, int8_size, int4_size)


def _four_bits(store: Store) -> bool:
    """Whether a four-bit form of a tensor is there, or the sentinel of all."""
    return store.exists(INT4_READY) or any(name.endswith("__q4a.npy") for name in store.names(FOLDER))


def _require_asked(tensor: Tensor, layout: AffineLayout, options: Int4Options) -> None:
    """Refuse four bits that are there in another form than what is asked for by name."""
    if layout.bits != 4:
        return
    form = "q4" if isinstance(layout.zero, Constant) else "q4a"
    group = _group(layout.matrix_of(tensor.shape)[1], options)
    asked = (options.form or form, group if options.group else layout.group_size, options.scales or layout.scales)
    stored = (form, layout.group_size, layout.scales)
    if asked != stored:
        raise UsageError(
            f"expected four bits of the form {asked}, as asked for (form, group, scales), found {stored}: "
            f"remove {INT4_READY} and the files tensors/*__{form}.npy with their scales first, where eight bits are "
            "still there",
            rule="int4.other-form",
            where=tensor.name,
        )


def _group(cols: int, options: Int4Options) -> int | None:
    """Return the columns that share a scale: as asked for, else the largest smaller power of two; None if none fits."""
    group = options.group or GROUP
    while group >= LEAST_GROUP:
        if cols % group == 0:
            return group
        group //= 2
    return None


def _step(tensor: Tensor, layout: AffineLayout, options: Int4Options) -> Encode | None:
    """Return how a tensor gets four bits, as the matrix of its codes, decoded to f32; None where no group fits."""
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
    asked: dict[str, Any] = {
        "bits": 4,
        "group": group,
        **_OPTIONS[options.form or "q4a"],
        "scales": options.scales or "f32",
    }
    if options.quantizer == "mse" or not asked["symmetric"]:
        asked["quantizer"] = options.quantizer
    try:
        return _encode(matrix, asked)
    except UnsupportedError as error:
        if error.rule != UNDERFLOW:
            raise
    return _encode(matrix, {**asked, "scales": "f32"})


def _encode(matrix: Tensor, asked: Mapping[str, Any]) -> Encode:
    codec = CODECS[AffineLayout.codec]

    def made(options: Mapping[str, Any]) -> Encoder:
        return codec.encoder(matrix.shape, matrix.dtype, options)

    if asked["scales"] != "f32":
        resolve_range(made(asked), made, asked, first_values(matrix))  # refuses what is too small for the scales
    encoder = made(asked)
    spec = encoded_spec(matrix.name, matrix, encoder, "raw")
    return Encode(matrix, spec, ENCODED, "int4", exact=False, encoder=encoder, options=asked)


def _sidecar(store: Store) -> Sidecar | None:
    if not store.exists(SIDECAR):
        return None
    return sidecar.parse(store.read(SIDECAR, MAX_MANIFEST, "npydir.manifest-length"))


def _four(names: Container[str], key: str) -> tuple[str, ...]:
    """Return the suffixes of a tensor's complete four-bit form, the one that readers take; none where there is none."""
    for suffixes in FORMS.values():
        if all(f"{key}__{suffix}.npy" in names for suffix in suffixes):
            return suffixes
    return ()


def _size(store: Store, names: Sequence[str]) -> int:
    return sum(store.stat(name).size for name in names)


def _drop(directory: Directory, keys: Mapping[str, str]) -> None:
    """Remove eight-bit arrays: first what names them, then codes, then scales, which alone count for nothing."""
    stated = _sidecar(directory)
    if stated is not None:
        manifest = directory.read(MANIFEST, MAX_MANIFEST, "npydir.manifest-length")
        directory.write(SIDECAR, encode_sidecar_without(stated, manifest, dict.fromkeys(keys, _INT8)))
    for suffix in _INT8:
        directory.remove(*(file_of(key, suffix) for key in keys.values()))
