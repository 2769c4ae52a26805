"""Parse assumptions of the user (``KEY=VALUE``), which replace values in the chips' data files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ingot.errors import UsageError
from ingot.ext.ane.chips.chips import Chip
from ingot.ext.ane.chips.gates import ORDINARY, Conditions
from ingot.recipes.recipe import Patterns

_CONDITIONS = tuple(item.name for item in fields(Conditions))
_BOOLEANS: dict[str, Any] = {"true": True, "yes": True, "false": False, "no": False}


@dataclass(frozen=True)
class _Condition:
    hits: Patterns | None
    key: str
    value: Any


@dataclass(frozen=True)
class Assumptions:
    """Assumed cells and outcomes of chips, and assumed conditions of tensors.

    ``cells`` are tuples of a chip's name (None for all chips), a key and a value. ``of_tensors`` are conditions with
    patterns of tensor names.
    """

    cells: tuple[tuple[str | None, str, Any], ...] = ()
    of_tensors: tuple[_Condition, ...] = ()

    def apply(self, chip: Chip) -> Chip:
        """Return the chip with the assumed values."""
        for name, key, value in self.cells:
            if name in (None, chip.name):
                chip = chip.assuming(key, value)
        return chip

    def conditions(self, name: str) -> Conditions:
        """Return the conditions of the tensor ``name``; if a condition has several assumed values, the last one
        applies.
        """
        result = ORDINARY
        for item in self.of_tensors:
            if item.hits is None or item.hits(name):
                result = replace(result, **{item.key: item.value})
        return result


def parse_assumptions(texts: Sequence[str], chips: Sequence[str]) -> Assumptions:
    """Parse ``KEY=VALUE``, ``CHIP.KEY=VALUE`` and ``PATTERN:CONDITION=VALUE``.

    Raises
    ------
    UsageError
        ``ane.assume``: invalid syntax, a chip that is not in ``chips``, or a condition of the wrong type.
    """
    cells: list[tuple[str | None, str, Any]] = []
    of_tensors: list[_Condition] = []
    for text in texts:
        assigned, equals, text_value = text.rpartition("=")
        key = assigned.strip()
        value = _value(text_value.strip())
        pattern, colon, last = key.rpartition(":")
        if not equals or not key or not text_value.strip():
            raise UsageError(f"expected KEY=VALUE, found {text!r}", rule="ane.assume")
        if last in _CONDITIONS:
            _require_condition(last, value)
            of_tensors.append(_Condition(Patterns((pattern,)) if colon else None, last, value))
            continue
        chip, dot, cell = key.partition(".")
        if dot and chip not in chips:
            raise UsageError(f"expected one of the chips {', '.join(chips)}, found {chip!r}", rule="ane.assume")
        cells.append((chip if dot else None, cell if dot else key, value))
    return Assumptions(tuple(cells), tuple(of_tensors))


def _value(text: str) -> Any:
    if text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    for number_type in (int, float):
        try:
            return number_type(text)
        except ValueError:
            continue
    return text


def _require_condition(key: str, value: Any) -> None:
    switch = key in ("tile_overlap", "mutable")
    if isinstance(value, bool) != switch or (not switch and (not isinstance(value, int) or value < 1)):
        expected = "true or false" if switch else "a positive integer"
        raise UsageError(f"expected {expected} for {key}, found {value!r}", rule="ane.assume")
