"""What people measured on chips, beside what the time model says of the same rows (``spec/ane-times.md``)."""

from __future__ import annotations

from dataclasses import dataclass

from ingot.ext.ane.chips.chips import data, load_chip
from ingot.ext.ane.chips.cost import moved_bytes, predict
from ingot.ext.ane.chips.form import DENSE, INTEGER, PALETTE, SPARSE, Form
from ingot.ext.ane.chips.gates import decide


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement in milliseconds and the model's; ``fitted``: the model's figures come from such rows."""

    chip: str
    weights: int
    form: str
    density: float
    moved: int
    predicted: float
    measured: float
    fitted: bool
    source: str

    @property
    def off(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1


def measured_rows() -> list[Row]:
    """Return every row of ``data/measured.toml`` with its prediction."""
    rows = []
    for group in data("measured")["groups"]:
        chip = load_chip(group["chip"])
        for item in group["rows"]:
            form = _form(item["form"], item["weights"], item.get("density", 1.0))
            decision = decide(form, chip)
            time = predict(form, decision, chip)
            assert time is not None
            rows.append(
                Row(
                    chip.name,
                    form.elements,
                    item["form"],
                    form.density,
                    moved_bytes(form, decision),
                    time.alone,
                    item["ms"],
                    group["fitted"],
                    group["source"],
                )
            )
    return rows


def _form(label: str, weights: int, density: float) -> Form:
    """Return a form of the size; scales and tables count as those of a square matrix."""
    kept = round(weights * density)
    return {
        "dense": Form(DENSE, weights),
        "int8": Form(INTEGER, weights, 8, scales=round(weights**0.5)),
        "palette4": Form(PALETTE, weights, 4),
        "sparse": Form(SPARSE, weights, nonzeros=kept),
        "sparse+palette4": Form(SPARSE, weights, nonzeros=kept, inner=Form(PALETTE, weights, 4)),
    }[label]
