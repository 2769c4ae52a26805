"""In what repacked tensors equal their sources, one by one and counted (``spec/interop.md``, "Grades")."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from ingot.codecs.base import GRADES, IN_F32, IN_TYPE, INTEGERS, SCALES
from ingot.engine.steps import Repack
from ingot.engine.work import Step
from ingot.formats.base import Format
from ingot.model.report import Counts, Texts

_SAID: Mapping[str, str] = {
    INTEGERS: "integers",
    SCALES: "scales",
    IN_F32: "values in f32",
    IN_TYPE: "values in the target's type",
}


def equality(step: Step, format: Format, inexact: Collection[str]) -> Texts | None:
    """Return the grades in which a tensor is equal in ``format``; None for what is not repacked.

    ``inexact`` are tensors of which a view has changed the values in f32.
    """
    if not isinstance(step, Repack):
        return None
    found = step.repack.equal(steps=format.traits.rounds_steps)
    return [grade for grade in found if grade != IN_F32 or step.spec.name not in inexact]


def counted(found: Iterable[Texts | None]) -> Counts:
    """Return how many repacked tensors are equal in each grade."""
    repacked = [grades for grades in found if grades is not None]
    return {grade: sum(grade in grades for grades in repacked) for grade in GRADES}


def said(count: int, grades: Counts) -> str:
    """Return the counts in words, of so many repacked tensors."""
    return f"of {count} repacked: " + ", ".join(f"{_SAID[grade]} of {number}" for grade, number in grades.items())
