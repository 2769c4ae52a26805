"""Pack tensors for a Neural Engine into kernel units, and describe the contents of kernel units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import quote

import numpy as np

from ingot.artifacts.open import open as open_checkpoint
from ingot.core.options import takes
from ingot.errors import IngotError, UnsupportedError, UsageError
from ingot.ext.ane.assume import parse_assumptions
from ingot.ext.ane.chips.activation import ActivationLut, fit_lut
from ingot.ext.ane.chips.chips import Chip, load_chip
from ingot.ext.ane.chips.descriptor import slots, streams
from ingot.ext.ane.chips.gates import Conditions, Decision, decide
from ingot.ext.ane.chips.kernel_format import kernel_format
from ingot.ext.ane.kernel_units.header import MAGIC, SECTIONS, align, groups, is_unit, stored_digest
from ingot.ext.ane.kernel_units.index import INDEX, SUFFIX, Index
from ingot.ext.ane.kernel_units.pack import pack_unit
from ingot.ext.ane.kernel_units.unit import KernelUnit, read_unit
from ingot.ext.ane.options import KernelOptions
from ingot.ext.ane.plan import KERNEL, form_of_tensor, use_of
from ingot.ext.ane.stored import dense, halves, identity, stored
from ingot.model.bytesource import Target
from ingot.model.checkpoint import Checkpoint
from ingot.model.store import OverwritePolicy, Store
from ingot.model.tensor import Tensor
from ingot.reporting.report import Bytes, Column, Figure, Line, Report, Shape, Table, figures_of, table_of
from ingot.reporting.reportable import Reportable
from ingot.stores.local import LocalTarget
from ingot.stores.location import AnyPath, Location


@dataclass(frozen=True, slots=True)
class KernelReport(Reportable):
    """The packed kernel: the file, its size in bytes, its kernel format, and the reason for the format."""

    path: str
    tensor: str
    chip: str
    form: str
    decision: Decision
    nbytes: Bytes

    def report(self) -> Report:
        """Return all figures as a ``Report``."""
        figures = [
            *figures_of(self),
            Figure("outcome", self.decision.outcome, data=False),
            Figure("why", self.decision.reason, data=False),
            Figure("gate", f"{self.decision.gate}; {self.decision.evidence}", data=False),
        ]
        lines = [Line("{path}: {nbytes}, {form} for {chip}"), Line("  the weight {outcome}: {why} ({gate})")]
        return Report(figures, lines)


@takes(KernelOptions, "kernel")
def pack_kernel(options: KernelOptions) -> KernelReport:
    """Pack a tensor of a checkpoint into a kernel unit at ``out``; a weight that folds is packed as dense fp16.

    ``name`` is the name of the tensor, and ``bias`` that of a tensor with one value per channel. ``activation`` is a
    table, or the name of a function, for which a table is fitted as by ``ingot lut``. ``domain`` and ``outside`` are
    then options of the fit.

    Raises
    ------
    UsageError
        ``target.exists``,
        ``tensor.unknown``, ``ane.layout``, ``ane.budget``, ``ane.function``, ``ane.chip``, ``ane.assume``.
    UnsupportedError
        ``ane.refused``: the chip refuses the tensor's storage form.
    """
    name = options.name
    if options.out is None:
        raise UsageError("name a file to write", rule="ane.layout")
    out = Location.parse(options.out)
    out.require_writable()
    lut = _table(options)
    chip = load_chip(options.chip)
    assumptions = parse_assumptions(options.assume, [chip.name])
    chip = assumptions.apply(chip)
    with open_checkpoint(options.path) as checkpoint:
        for tensor_name in (name, options.bias):
            if tensor_name is not None and tensor_name not in checkpoint:
                raise checkpoint.no_tensor(tensor_name)
        bias = checkpoint[options.bias] if options.bias is not None else None
        data, format_name, decision = _unit(checkpoint[name], bias, lut, chip, assumptions.conditions(name))
    out.write(data, overwrite=options.overwrite)
    return KernelReport(out.display, name, chip.name, format_name, decision, len(data))


def _table(options: KernelOptions) -> ActivationLut | None:
    if isinstance(options.activation, str):
        return fit_lut(options.activation, None, options.domain, options.outside or "clamp").lut
    if (options.domain, options.outside) != (None, None):
        raise UsageError("expected --activation NAME with --domain and --outside", rule="ane.function")
    return options.activation


@dataclass(frozen=True, slots=True)
class ModelReport(Reportable):
    """The packed kernels of a checkpoint: a unit per kernel, and the refused kernels with reasons."""

    path: str
    chip: str
    kernels: tuple[KernelReport, ...]
    refused: Mapping[str, str]

    def report(self) -> Report:
        """Return a report with all units; its text has only the number of units of each format, and the refused
        kernels.
        """
        counts = Counter((item.form, item.decision.outcome) for item in self.kernels)
        columns = (Column("", head="packed as"), Column("", head="which"), Column("", "count", "kernels"))
        figures = [
            Figure("path", self.path),
            Figure("chip", self.chip),
            Figure("refused", self.refused, "data"),
            Figure("count", len(self.kernels), "count", data=False),
            Figure("size", sum(item.nbytes for item in self.kernels), "bytes", data=False),
            Figure("reasons", [f"{name}: {reason}" for name, reason in self.refused.items()], "texts", data=False),
        ]
        tables = [
            table_of("kernels", self.kernels, KernelReport),
            Table("", columns, [(*group, count) for group, count in counts.items()], data=False),
        ]
        closing = [Line("{item}", "refused", items="reasons")]
        return Report(figures, [Line("{path}: {count} kernel units for {chip}, {size}")], tables, closing)


def pack_model(
    path: AnyPath,
    folder: AnyPath,
    chip: str = "m1",
    *,
    assume: Sequence[str] = (),
    overwrite: bool = False,
) -> ModelReport:
    """Pack every kernel of a checkpoint, as listed by ``ingot plan``, into a folder: a file ``NAME.anek`` per kernel.

    The bias of a weight (``.bias`` for ``.weight``) is packed with it. ``kernels.json`` lists all units, so that the
    folder opens as a checkpoint. The folder appears when all units are written. An existing folder is replaced only
    with ``overwrite``, and only if it contains nothing but kernel units.

    Raises
    ------
    UsageError
        ``target.exists``, ``target.foreign``, ``ane.kernels`` (no kernel), and the errors of ``pack_kernel``.
    """
    location = Location.parse(path)
    destination = Location.parse(folder)
    target_chip = load_chip(chip)
    assumptions = parse_assumptions(assume, [target_chip.name])
    target_chip = assumptions.apply(target_chip)
    reports: list[KernelReport] = []
    refused: dict[str, str] = {}
    units: dict[str, tuple[str, str]] = {}
    with (
        open_checkpoint(location) as checkpoint,
        destination.stage(OverwritePolicy(overwrite, _require_units), directory=True) as staging,
    ):
        target = LocalTarget(staging.files)
        for name in checkpoint:
            tensor = checkpoint[name]
            if use_of(tensor, form_of_tensor(tensor)) != KERNEL:
                continue
            try:
                bias = _bias_of(checkpoint, name)
                data, format_name, decision = _unit(tensor, bias, None, target_chip, assumptions.conditions(name))
            except UnsupportedError as error:
                refused[name] = error.message
                continue
            file = quote(name, safe="._-") + SUFFIX
            _write(target, file, data)
            units[name] = file, stored_digest(data)
            reports.append(
                KernelReport(destination.child(file).display, name, target_chip.name, format_name, decision, len(data))
            )
        if not reports:
            raise UsageError(
                f"the checkpoint has no kernel that {target_chip.name} accepts",
                rule="ane.kernels",
                where=location.display,
            )
        index = Index(target_chip.name, target_chip.target, units, refused)
        _write(target, INDEX, index.to_bytes())
        staging.publish([*(file for file, _ in units.values()), INDEX])
    return ModelReport(destination.display, target_chip.name, tuple(reports), refused)


def _bias_of(checkpoint: Checkpoint, name: str) -> Tensor | None:
    stem = name.removesuffix(".weight")
    return checkpoint.get(f"{stem}.bias") if stem != name else None


def _write(target: Target, name: str, data: bytes) -> None:
    sink = target.create(name)
    try:
        sink.write_at(0, data)
    finally:
        sink.close()


def _require_units(store: Store) -> None:
    for name in store.tree():
        if name != INDEX and not ("/" not in name and name.endswith(SUFFIX) and _begins_as_unit(store, name)):
            raise UsageError(
                f"expected a folder of kernel units to replace, found {name!r}",
                rule="target.foreign",
                where=store.location,
            )


def _begins_as_unit(store: Store, name: str) -> bool:
    try:
        return is_unit(store.head(name, len(MAGIC)))
    except IngotError:
        return False


def _unit(
    tensor: Tensor, bias: Tensor | None, lut: ActivationLut | None, chip: Chip, conditions: Conditions
) -> tuple[bytes, str, Decision]:
    """Pack a tensor for ``chip``; return the bytes of the unit, the name of its kernel format, and the chip's
    decision.
    """
    name = tensor.name
    if len(tensor.shape) < 2:
        raise UsageError("expected a matrix or convolution, output channels first", rule="ane.layout", where=name)
    storage_form = form_of_tensor(tensor)
    decision = decide(storage_form, chip, conditions)
    if decision.outcome == "refused":
        raise UnsupportedError(
            f"{chip.name} refuses {storage_form.label}: {decision.reason}; see `ingot plan`",
            rule="ane.refused",
            where=name,
        )
    weight = stored(tensor, storage_form, decision) if decision.streams else identity(dense(tensor))
    extra = halves(bias, bias.name, tensor.shape[0]) if bias is not None else None
    packed = replace(weight, bias=extra, lut=lut)
    return pack_unit(packed, chip), kernel_format(packed.kernel_format).name, decision


@dataclass(frozen=True, slots=True)
class UnitReport(Reportable):
    """The description of a kernel unit for ``ingot inspect``. Sizes are in bytes.

    ``tiles`` are padded sizes of the weight tiles. ``word`` is the value of the KernelCfg register. ``streams`` are the
    coefficient streams that the unit's sections need, with their registers (table 25.4). ``slots`` are the purposes of
    the ten words of a record that are -1, as B25 names them.
    """

    path: str
    nbytes: Bytes
    version: int
    target: str
    kernel_format: int
    form: str
    shape: Shape
    density: float
    ocg: int
    groups: int
    copies: int
    tiles: tuple[int, ...]
    word: int
    streams: Mapping[str, Mapping[str, int]]
    slots: Sequence[str]
    sections: Mapping[str, Mapping[str, int]]
    records: Sequence[Sequence[int]]

    def report(self, *, records: bool = True) -> Report:
        """Return a report with all figures and sections; its text has the records only if ``records`` is set."""
        live = [size for size in self.tiles if size]
        figures = [
            *figures_of(self),
            Figure("hex", f"{self.word:#010x}", data=False),
            Figure("beside", list(self.streams) or ["none"], "texts", data=False),
            Figure("all", len(self.tiles), "count", data=False),
            Figure("used", len(live), "count", data=False),
            Figure("least", min(live, default=0), "position", data=False),
            Figure("most", max(live, default=0), "position", data=False),
        ]
        word = "kernel word {hex}" if self.version > 1 else "no kernel word"
        lines = [
            Line("{path}: kernel unit version {version} for target {target}, {nbytes}"),
            Line(
                "  {shape}, kernel format {kernel_format} ({form}), density {density}; {groups} groups of up to {ocg} "
                "channels, {copies} copies of the tables"
            ),
            Line(f"  {word}; streams beside the weights: {{beside}}"),
            Line("  weights {all} tiles, {used} of them used, {least} to {most} bytes"),
        ]
        keys = ("offset", "length", "count", "type", "bits")
        sections = [(name, *(item[key] for key in keys)) for name, item in self.sections.items()]
        tables = [Table("", _SECTIONS, sections, data=False)]
        if records:
            rows = [
                (index, record[0], record[1], sum(word == _ABSENT for word in record))
                for index, record in enumerate(self.records)
            ]
            tables.append(Table("", _RECORDS, rows, data=False))
        return Report(figures, lines, tables)


_ABSENT = 0xFFFFFFFF
_SECTIONS = (
    Column("", head="section"),
    *(Column("", "position", head) for head in ("offset", "bytes", "count", "type", "bits")),
)
_RECORDS = tuple(Column("", "position", head) for head in ("group", "offset", "channels", "slots at -1, of 10"))


def load_kernel(path: AnyPath) -> KernelUnit:
    """Return a kernel unit after checking it. Raises the errors of ``read_unit``."""
    location = Location.parse(path)
    return read_unit(location.read(), location.display)


def inspect_kernel(path: AnyPath) -> UnitReport:
    """Return the description of a kernel unit after checking it."""
    location = Location.parse(path)
    data = location.read()
    unit = read_unit(data, location.display)
    header = unit.header
    mask = unit.weight.mask
    ends = {name: header.sections[name] for name in SECTIONS}
    starts: dict[int, int] = {}
    for index, (tile, _, _) in enumerate(groups(header)):
        starts.setdefault(tile, int(unit.records[index, 0]))
    stops = [*list(starts.values())[1:], align(ends["weights"].length)]
    sizes = {tile: stop - starts[tile] for tile, stop in zip(starts, stops, strict=True)}
    return UnitReport(
        path=location.display,
        nbytes=len(data),
        version=header.version,
        target=header.target,
        kernel_format=header.kernel_format,
        form=kernel_format(header.kernel_format).name,
        shape=header.shape,
        density=1.0 if mask is None else float(np.count_nonzero(mask) / mask.size),
        ocg=header.ocg,
        groups=len(unit.records),
        copies=header.copies,
        tiles=tuple(sizes.get(tile, 0) for tile in range(header.tiles)),
        word=header.word,
        streams={
            stream.name: {"enable": stream.enable, "base": stream.base, "relocation": stream.relocation}
            for section, stream in streams().items()
            if ends[section].length
        },
        slots=slots(),
        sections={
            name: {
                "offset": item.offset,
                "length": item.length,
                "count": item.count,
                "type": item.typeno,
                "bits": item.bits,
            }
            for name, item in ends.items()
        },
        records=unit.records.tolist(),
    )
