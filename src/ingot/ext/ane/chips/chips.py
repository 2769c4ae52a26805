"""Data on the chips: every cell has a value, the class of its evidence and its source (``spec/ane-chips.md``).

If a cell's value is not published, reading the cell raises an error. If sources contradict each other about a cell, the
cell has the key of an entry of ``contradictions()``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any

from ingot.core.registry import did_you_mean
from ingot.errors import UnsupportedError, UsageError

EVIDENCE = ("measured", "decompiled", "inferred", "predicted", "contradicted", "assumed", "unknown")
"""Classes of evidence, from the strongest to ``unknown``, which is none. The user sets ``assumed`` values with
``--assume``.
"""
ASSUMED = "assumed"
OUTCOMES = ("streams", "folds", "refused")

_GENERATIONS = ("h11", "h12", "h13", "h14", "h15", "h16", "h17", "h18", "h18g")


@dataclass(frozen=True, slots=True)
class Cell:
    """A fact about a chip: its value, its class of evidence, its source, and the key of its contradiction, if any.

    The value is None if it is not published.
    """

    value: Any
    evidence: str
    source: str
    contradiction: str | None = None


@dataclass(frozen=True, slots=True)
class Contradiction:
    """A disagreement of sources: its subject, the claims, and the claim that Ingot uses.

    ``keys`` are the cells with which the user can set the value that Ingot uses.
    """

    key: str
    about: str
    sides: tuple[str, ...]
    used_claim: str
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Chip:
    """A chip: its name in Ingot (``m1``), the compiler's target (``H13``), the product, its cells and outcomes.

    ``outcomes`` maps labels of storage forms (``palette4``, ``sparse+palette4``) to ``streams``, ``folds`` or
    ``refused``. It has the outcomes that were observed, or about which sources contradict each other. For all other
    forms the gates decide.
    """

    name: str
    target: str
    product: str
    cells: Mapping[str, Cell]
    outcomes: Mapping[str, Cell] = field(default_factory=dict)

    def cell(self, key: str) -> Cell:
        """Return the cell with the name ``key``. Raises ``UsageError`` ``ane.cell`` if there is no such cell."""
        if key not in self.cells:
            raise UsageError(
                f"expected a cell of a chip ({', '.join(sorted(self.cells))}), found {key!r}", rule="ane.cell"
            )
        return self.cells[key]

    def value(self, key: str) -> Any:
        """Return the value of the cell ``key``.

        Raises
        ------
        UnsupportedError
            ``ane.unknown-cell``: the value is not published; ``--assume KEY=VALUE`` sets it.
        """
        cell = self.cell(key)
        if cell.value is None:
            raise UnsupportedError(
                f"{key} of {self.name} is not known: {cell.source}; assume a value: {key}=VALUE",
                rule="ane.unknown-cell",
            )
        return cell.value

    def published(self, key: str) -> Cell | None:
        """Return the cell ``key`` if it exists and its value is published; else None."""
        cell = self.cells.get(key)
        return cell if cell is not None and cell.value is not None else None

    def assuming(self, key: str, value: Any) -> Chip:
        """Return this chip with the user's value for a cell, or for the outcome of a form.

        Raises
        ------
        UsageError
            ``ane.assume``: an unknown cell or form, a value of the wrong type, or a cell without effect.
        """
        if key in IDLE:
            raise UsageError(f"expected a cell that decides something, found {key}: {IDLE[key]}", rule="ane.assume")
        cell = Cell(value, ASSUMED, "set by the user")
        if value in OUTCOMES and key not in self.cells:
            _require_label(key)
            return replace(self, outcomes={**self.outcomes, key: cell})
        if key not in self.cells and key not in _OPTIONAL:
            raise UsageError(
                f"expected KEY=VALUE with a cell ({', '.join(sorted({*self.cells, *_OPTIONAL}))}) or a form "
                f"({', '.join(LABELS)}) and {', '.join(OUTCOMES)}; found {key}={value}",
                rule="ane.assume",
            )
        _require_kind(key, value)
        return replace(self, cells={**self.cells, key: cell})


_OPTIONAL = ("bandwidth_sparse", "bandwidth_sparse_palette", "palette_rate", "mac_rate")
"""Cells that only some chips have: separate rates of streamed forms, and measured rates of multiplications."""
IDLE: Mapping[str, str] = {
    "isa_version": "it names a descriptor, whose properties are separate cells",
    "double_int8": "it needs 8-bit activations, which a checkpoint does not describe",
    "num_nes": "the engine's cores are packed as weight_tiles",
    "tile_alignment": "64 bytes are part of the kernel unit's version",
    "segment_alignment": "it applies to instructions, which a kernel unit does not have",
}
"""Cells without effect, with the reason; assuming another value is refused."""
_WIDTHS = (1, 2, 3, 4, 6, 8)
LABELS = (
    "e4m3",
    "int8",
    "blockwise8",
    *(f"palette{bits}" for bits in _WIDTHS),
    "sparse",
    *(f"sparse+palette{bits}" for bits in _WIDTHS),
    "sparse+int8",
)
"""Labels of the storage forms whose outcome can be in the data files, or set by the user."""


def _require_label(key: str) -> None:
    if key not in LABELS:
        raise UsageError(f"expected a form ({', '.join(LABELS)}), found {key!r}", rule="ane.assume")


def _require_kind(key: str, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if key.startswith("palette_width"):
        narrow = key[-1] in "123"
        words = ("legal", "refused", "as 4 bits") if narrow else ("legal", "refused")
        fits = value in words
        expected = f"{', '.join(words[:-1])} or {words[-1]}"
    elif key.startswith("gate_"):
        fits = value in (0, 1)
        expected = "0 or 1"
    elif key == "floor":
        fits = number and 0 <= value < 1e9
        expected = "milliseconds of at least 0"
    elif key.startswith("bandwidth") or key in ("palette_rate", "mac_rate"):
        fits = number and 0 < value < 1e9
        expected = "a rate above 0"
    elif isinstance(value, bool) or key in _SWITCHES:
        fits = isinstance(value, bool) and key in _SWITCHES
        expected = "true or false, of a switch"
    else:
        fits = number and 1 <= value <= 2**40 and value == int(value)
        expected = "a positive integer"
    if not fits:
        raise UsageError(f"expected {expected} for {key}, found {value!r}", rule="ane.assume")


_SWITCHES = (
    "asymmetric",
    "sparse_binary",
    "multi_palette",
    "vector_palette",
    "detect_zeros",
    "winograd",
    "copies_per_core",
)


def chip_names() -> tuple[str, ...]:
    """Return the names of all chips, M-series first."""
    return tuple(sorted(_chips(), key=lambda name: (name[0] != "m", name)))


def load_chip(name: str) -> Chip:
    """Return a chip by its name, an alias or the compiler's target (any case).

    Raises
    ------
    UsageError
        ``ane.chip``.
    """
    key = name.strip().lower()
    chip = _chips().get(_aliases().get(key, key))
    if chip is None:
        near = did_you_mean(name, chip_names())
        raise UsageError(f"expected a chip ({', '.join(chip_names())}), found {name!r}{near}", rule="ane.chip")
    return chip


@cache
def contradictions() -> Mapping[str, Contradiction]:
    """Return the known contradictions by their keys."""
    return {
        key: Contradiction(key, row["about"], tuple(row["sides"]), row["used_claim"], tuple(row["keys"]))
        for key, row in data("contradictions").items()
    }


@cache
def data(name: str) -> Mapping[str, Any]:
    """Return the parsed data file ``name`` of this folder. It is shared, so callers must not change it."""
    return tomllib.loads(resources.files(__package__).joinpath("data", f"{name}.toml").read_text("utf-8"))


@cache
def _chips() -> Mapping[str, Chip]:
    common = _cells(data("common")["cells"])
    chips = {}
    for generation in _GENERATIONS:
        root = data(generation)
        shared = {**common, **_cells(root.get("cells", {}))}
        outcomes = _cells(root.get("outcomes", {}))
        for name, row in root["chips"].items():
            cells = {**shared, **_cells(row.get("cells", {}))}
            chip_outcomes = {**outcomes, **_cells(row.get("outcomes", {}))}
            chips[name] = Chip(name, row["target"], row["product"], cells, chip_outcomes)
    return chips


@cache
def _aliases() -> Mapping[str, str]:
    names: dict[str, str] = {}
    for generation in _GENERATIONS:
        for name, row in data(generation)["chips"].items():
            for alias in (*row.get("aliases", ()), str(row["target"]).lower()):
                names.setdefault(alias, name)
    # If a phone and a Mac share a target, the target alone means the Mac, which is more common among users.
    return {**names, "h13": "m1", "h14": "m2", "h15": "m3", "h16": "m4", "h17": "m5"}


def _cells(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Cell]:
    return {key: _cell(key, row) for key, row in rows.items()}


def _cell(key: str, row: Mapping[str, Any]) -> Cell:
    cell = Cell(row.get("value"), row["evidence"], row["source"], row.get("contradiction"))
    if cell.evidence not in EVIDENCE or (cell.value is None) != (cell.evidence == "unknown"):
        raise ValueError(f"cell {key}: evidence {cell.evidence}, value {cell.value}")
    return cell


def weakest(cells: Iterable[Cell]) -> Cell:
    """Return the cell with the weakest evidence; ties go to the first."""
    return max(cells, key=lambda cell: EVIDENCE.index(cell.evidence))
