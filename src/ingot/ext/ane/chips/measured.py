"""Published measurements on chips, with the predictions of the time model (``spec/ane-times.md``)."""

from __future__ import annotations

from dataclasses import dataclass

from ingot.ext.ane.chips.chips import data, load_chip
from ingot.ext.ane.chips.cost import moved_bytes, predict
from ingot.ext.ane.chips.gates import decide
from ingot.ext.ane.chips.storage_form import DENSE, INTEGER, PALETTE, SPARSE, StorageForm


@dataclass(frozen=True, slots=True)
class Row:
    """A published measurement of a layer, and its prediction, both in milliseconds.

    ``fitted`` is true if the chip's bandwidth and floor were fitted to measurements that include this one.
    """

    chip: str
    weights: int
    label: str
    density: float
    moved: int
    predicted: float
    measured: float
    fitted: bool
    source: str

    @property
    def off(self) -> float:
        """Relative error of the prediction: predicted over measured, minus 1."""
        return self.predicted / self.measured - 1


def measured_rows() -> list[Row]:
    """Return every row of ``data/measured.toml`` with its prediction."""
    rows = []
    for group in data("measured")["groups"]:
        chip = load_chip(group["chip"])
        for item in group["rows"]:
            storage_form = _storage_form(item["form"], item["weights"], item.get("density", 1.0))
            decision = decide(storage_form, chip)
            time = predict(storage_form, decision, chip)
            assert time is not None
            rows.append(
                Row(
                    chip.name,
                    storage_form.elements,
                    item["form"],
                    storage_form.density,
                    moved_bytes(storage_form, decision),
                    time.alone,
                    item["ms"],
                    group["fitted"],
                    group["source"],
                )
            )
    return rows


def _storage_form(label: str, weights: int, density: float) -> StorageForm:
    """Return the storage form with the label ``label`` of a square matrix with ``weights`` elements."""
    nonzero_count = round(weights * density)
    return {
        "dense": StorageForm(DENSE, weights),
        "int8": StorageForm(INTEGER, weights, 8, scales=round(weights**0.5)),
        "palette4": StorageForm(PALETTE, weights, 4),
        "sparse": StorageForm(SPARSE, weights, nonzeros=nonzero_count),
        "sparse+palette4": StorageForm(SPARSE, weights, nonzeros=nonzero_count, inner=StorageForm(PALETTE, weights, 4)),
    }[label]
