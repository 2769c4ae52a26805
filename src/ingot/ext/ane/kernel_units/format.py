"""The format of kernel units; it has no writer, because packing depends on a chip (use `ingot kernel`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import unquote

from ingot.errors import FormatError, IntegrityError, UnsupportedError
from ingot.ext.ane.chips.kernel_format import kernel_format
from ingot.ext.ane.kernel_units.header import is_unit
from ingot.ext.ane.kernel_units.index import INDEX, MAX_INDEX, SUFFIX, Index, parse_index
from ingot.ext.ane.kernel_units.tensors import DecodedCache, Unit, UnitSource
from ingot.ext.ane.kernel_units.unit import read_unit
from ingot.formats.base import Catalog, Format, FormatWriter, WriteOptions
from ingot.model.artifact import Artifact
from ingot.model.bytesource import Target
from ingot.model.spec import TensorSpec
from ingot.model.store import Store
from ingot.model.tensor import Tensor
from ingot.reporting.report import Column, Table

_WRITTEN = "kernel units are packed for a chip: write them with `ingot kernel MODEL FOLDER --chip m1`"
_COLUMNS = (
    Column("", head="kernel unit"),
    Column("", head="packed as"),
    Column("", head="target"),
    Column("", "count", "tiles"),
    Column("", "count", "channels a group"),
    Column("", "bytes", "size"),
)


class AnekFormat(Format):
    """Format of a kernel unit of the Neural Engine, or of a folder with the units of a model; see
    spec/ane-kernels.md."""

    name = "anek"
    suffixes: tuple[str, ...] = (SUFFIX,)
    summary = "kernel units of the Apple Neural Engine, a weight or a folder of them; `ingot kernel` packs them"

    def claims(self, name: str, head: bytes) -> bool:
        """Return whether the file has the magic or the suffix of a kernel unit, or the name of a folder's index."""
        return is_unit(head) or name.lower().endswith(self.suffixes) or name == INDEX

    def entry(self, names: Sequence[str]) -> str | None:
        """Return the index if the folder has one, else the unit if the folder has exactly one, else None."""
        if INDEX in names:
            return INDEX
        units = [name for name in names if name.lower().endswith(SUFFIX) and not name.startswith(".")]
        return units[0] if len(units) == 1 else None

    def why_unsupported(self, spec: TensorSpec) -> str | None:
        """Return the reason why no tensor can be stored: units are packed for a chip."""
        return _WRITTEN

    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Check the headers of all units and the masks of sparse units; return the tensors. Other weights are not read.

        The CRC-32C of a unit is compared when a tensor's bytes are read for the first time.

        Raises
        ------
        FormatError
            ``anek.*``.
        IntegrityError
            ``manifest.digest`` for a damaged index; ``anek.digest`` for a unit whose digest differs from that in the
            index.
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
                unit = Unit.from_source(name, sources[-1])
                _require_digest(unit, digest)
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
            check_whole=partial(_check_all_bytes, units),
        )

    def metadata(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an empty mapping: the format cannot store metadata."""
        return {}

    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        """Raise ``UnsupportedError`` ``anek.write``: the format has no writer."""
        raise UnsupportedError(_WRITTEN, rule="anek.write")

    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> FormatWriter:
        """Raise ``UnsupportedError`` ``anek.write``: the format has no writer."""
        raise UnsupportedError(_WRITTEN, rule="anek.write")


def _require_files(store: Store, index: Index) -> None:
    names = set(store.names())
    missing = [file for file, _ in index.units.values() if file not in names]
    if missing:
        raise FormatError(
            "anek.missing", f"expected this file, because {INDEX} names it, but it does not exist "
                f"({len(missing)} files are missing)",
            where=missing[0],
        )  # fmt: skip


def _require_digest(unit: Unit, digest: str | None) -> None:
    if digest is not None and unit.digest != digest:
        raise IntegrityError(
            "anek.digest", f"expected the unit with digest {digest}, found {unit.digest}", where=unit.source.name
        )


def _tensors(units: Iterable[Unit]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    decoded = DecodedCache()
    for unit in units:
        for tensor in unit.tensors(decoded):
            if tensor.name in tensors:
                raise FormatError(
                    "anek.name", f"expected one tensor named {tensor.name[:200]!r}, found two", where=unit.source.name
                )
            tensors[tensor.name] = tensor
    return tensors


def _check_all_bytes(units: Sequence[Unit]) -> None:
    """Check every byte of every unit: digests, records, copies and padding."""
    for unit in units:
        read_unit(unit.source.source.view(0, unit.source.size), unit.source.name)


def _notes(store: Store, index: Index) -> Iterable[tuple[str, str]]:
    indexed = {file for file, _ in index.units.values()}
    extra = [name for name in store.names() if name.endswith(SUFFIX) and name not in indexed]
    if extra:
        yield (
            "anek.extra",
            f"{INDEX} does not name {len(extra)} units, which are not read, for example {extra[0][:80]!r}",
        )
    if index.refused:
        name, reason = next(iter(index.refused.items()))
        example = f"for example {name[:80]}: {reason[:200]}"
        yield (
            "anek.refused",
            f"{len(index.refused)} kernels of the model were refused and are not in the folder, {example}",
        )


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
