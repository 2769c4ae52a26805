"""Kernel units as a format: read, never written, because what is packed depends on a chip (`ingot kernel`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import unquote

from ingot.errors import FormatError, IntegrityError, UnsupportedError
from ingot.formats.anek.header import is_unit
from ingot.formats.anek.index import INDEX, MAX_INDEX, SUFFIX, Index, parse_index
from ingot.formats.anek.tensors import Decoded, Unit, UnitSource
from ingot.formats.anek.unit import read_unit
from ingot.formats.base import Catalog, Format, FormatWriter, WriteOptions
from ingot.model.artifact import Artifact
from ingot.model.bytesource import Target
from ingot.model.report import Column, Table
from ingot.model.spec import TensorSpec
from ingot.model.store import Store
from ingot.model.tensor import Tensor
from ingot.targets.ane.kernel_format import kernel_format

_WRITTEN = "kernel units are packed for a chip: `ingot kernel MODEL FOLDER --chip m1` makes them"
_COLUMNS = (
    Column("", head="kernel unit"),
    Column("", head="packed as"),
    Column("", head="target"),
    Column("", "count", "tiles"),
    Column("", "count", "channels a group"),
    Column("", "bytes", "size"),
)


class AnekFormat(Format):
    """A kernel unit of the Neural Engine, or the folder of a whole model's; see spec/ane-kernels.md."""

    name = "anek"
    suffixes: tuple[str, ...] = (SUFFIX,)
    summary = "kernel units of the Apple Neural Engine, a weight or a folder of them; `ingot kernel` packs them"

    def claims(self, name: str, head: bytes) -> bool:
        """By the magic, or the name of the index."""
        return is_unit(head) or name.lower().endswith(self.suffixes) or name == INDEX

    def entry(self, names: Sequence[str]) -> str | None:
        """The index of a model's units; without one the only unit."""
        if INDEX in names:
            return INDEX
        units = [name for name in names if name.lower().endswith(SUFFIX) and not name.startswith(".")]
        return units[0] if len(units) == 1 else None

    def why_unsupported(self, spec: TensorSpec) -> str | None:
        """Every tensor: units are packed for a chip."""
        return _WRITTEN

    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Check the headers of all units, and where sparse ones keep what; other weights are not read.

        The CRC-32C of a unit is compared when its first byte is read.

        Raises
        ------
        FormatError
            ``anek.*``.
        IntegrityError
            ``manifest.digest``, ``anek.digest``: the index, or a unit that is not the one it names.
        """
        if name != INDEX:
            return self._catalog(store, {unquote(name.removesuffix(SUFFIX)): (name, None)}, verify=verify)
        raw = store.read(INDEX, MAX_INDEX, "anek.index")
        index = parse_index(raw, verify=verify)
        _require_files(store, index)
        catalog = self._catalog(store, index.units, verify=verify)
        catalog.metadata = {"ane_chip": index.chip, "ane_target": index.target}
        catalog.headers = {INDEX: raw, **catalog.headers}
        catalog.manifest_digest = True
        catalog.notes = list(_notes(store, index))
        return catalog

    def _catalog(self, store: Store, files: Mapping[str, tuple[str, str | None]], *, verify: bool) -> Catalog:
        units: list[Unit] = []
        sources: list[UnitSource] = []
        try:
            for name, (file, digest) in files.items():
                sources.append(UnitSource(store.open(file), verify=verify))
                unit = Unit.of(name, sources[-1])
                _require_named(unit, digest)
                units.append(unit)
            tensors = _tensors(units)
        except BaseException:
            for source in sources:
                source.close()
            raise
        return Catalog(
            tensors,
            metadata={"ane_target": units[0].header.target},
            headers={file: unit.head for unit, (file, _) in zip(units, files.values(), strict=True)},
            sources=tuple(source.source for source in sources),
            details=partial(_details, units),
            check_whole=partial(_check_whole, units),
        )

    def metadata(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """None: there is no place for it."""
        return {}

    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        """Refused, as writing is: ``UnsupportedError`` ``anek.write``."""
        raise UnsupportedError(_WRITTEN, rule="anek.write")

    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> FormatWriter:
        """Refused: ``UnsupportedError`` ``anek.write``."""
        raise UnsupportedError(_WRITTEN, rule="anek.write")


def _require_files(store: Store, index: Index) -> None:
    names = set(store.names())
    missing = [file for file, _ in index.units.values() if file not in names]
    if missing:
        raise FormatError(
            "anek.missing", f"expected this file, which {INDEX} names, found none ({len(missing)} in all)",
            where=missing[0],
        )  # fmt: skip


def _require_named(unit: Unit, digest: str | None) -> None:
    if digest is not None and unit.digest != digest:
        raise IntegrityError(
            "anek.digest", f"expected the unit with {digest}, found {unit.digest}", where=unit.source.name
        )


def _tensors(units: Iterable[Unit]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    decoded = Decoded()
    for unit in units:
        for tensor in unit.tensors(decoded):
            if tensor.name in tensors:
                raise FormatError(
                    "anek.name", f"expected one tensor {tensor.name[:200]!r}, found two", where=unit.source.name
                )
            tensors[tensor.name] = tensor
    return tensors


def _check_whole(units: Sequence[Unit]) -> None:
    """Check every byte of every unit: digests, records, copies, padding."""
    for unit in units:
        read_unit(unit.source.source.view(0, unit.source.size), unit.source.name)


def _notes(store: Store, index: Index) -> Iterable[tuple[str, str]]:
    named = {file for file, _ in index.units.values()}
    extra = [name for name in store.names() if name.endswith(SUFFIX) and name not in named]
    if extra:
        yield "anek.extra", f"{len(extra)} units are not named by {INDEX}, such as {extra[0][:80]!r}: not read"
    if index.refused:
        name, reason = next(iter(index.refused.items()))
        told = f"such as {name[:80]}: {reason[:200]}"
        yield "anek.refused", f"{len(index.refused)} kernels of the model were refused and are not here, {told}"


def _details(units: Sequence[Unit]) -> Sequence[Table]:
    rows = [
        (
            unit.name,
            kernel_format(unit.header.kernel_format).name,
            unit.header.target,
            unit.header.tiles,
            unit.header.ocg,
            unit.source.size,
        )
        for unit in units
    ]
    return [Table("units", _COLUMNS, rows, f"{len(rows)} kernel unit{'s' * (len(rows) != 1)}")]
