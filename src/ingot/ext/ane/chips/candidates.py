"""List storage forms of a weight, and find the nearest form that streams on a chip and moves fewer bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ingot.ext.ane.chips.chips import Chip
from ingot.ext.ane.chips.cost import moved_bytes
from ingot.ext.ane.chips.gates import Conditions, Decision, decide
from ingot.ext.ane.chips.storage_form import BLOCKWISE, DENSE, INTEGER, PALETTE, SPARSE, StorageForm
from ingot.model.layouts.sparse import CooLayout, CsrLayout

_WIDTHS = (1, 2, 3, 4, 6, 8)
# Usual numbers of channels per codebook and of columns per scale with coremltools.
_GROUP = 16
_BLOCK = 32
_CSR = (CsrLayout.codec, CooLayout.codec)


@dataclass(frozen=True, slots=True)
class Better:
    """A form that moves fewer bytes: its label, the number of moved bytes, and whether it represents the same values.

    ``exact`` is True only if every value stays the same in fp16. This applies to integers with one scale that become a
    palette, and to lists of positions that become a mask. The error of any other form must be measured, by ``ingot plan
    --suggest`` or ``ingot convert``.
    """

    label: str
    moved: int
    exact: bool


def candidates(elements: int, channels: int, nonzeros: int | None = None) -> Iterator[tuple[str, StorageForm]]:
    """Yield the label and the storage form of each candidate for a matrix of ``elements`` elements in ``channels``
    rows.

    The sparse forms have ``nonzeros`` selected elements, by default half of all.
    """
    yield "dense", StorageForm(DENSE, elements)
    yield "int8", StorageForm(INTEGER, elements, 8, scales=channels)
    for bits in _WIDTHS:
        yield f"palette{bits}", StorageForm(PALETTE, elements, bits)
    groups = max(1, channels // _GROUP)
    yield f"palette4 per {_GROUP} channels", StorageForm(PALETTE, elements, 4, codebooks=max(groups, 2))
    yield "palette4 in pairs", StorageForm(PALETTE, elements, 4, vector=2)
    nonzero_count = elements // 2 if nonzeros is None else nonzeros
    yield "sparse", StorageForm(SPARSE, elements, nonzeros=nonzero_count)
    yield (
        "sparse+palette4",
        StorageForm(SPARSE, elements, nonzeros=nonzero_count, inner=StorageForm(PALETTE, elements, 4)),
    )
    yield (
        "sparse+int8",
        StorageForm(SPARSE, elements, nonzeros=nonzero_count, inner=StorageForm(INTEGER, elements, 8), scales=channels),
    )
    yield f"blockwise8 of {_BLOCK}", StorageForm(BLOCKWISE, elements, 8, scales=max(1, elements // _BLOCK))


def outcomes(chip: Chip, conditions: Conditions) -> dict[str, Decision]:
    """Return the decision of ``chip`` for every candidate form, by label; it does not depend on the size of the
    weight.
    """
    return {label: decide(storage_form, chip, conditions) for label, storage_form in candidates(1 << 20, 1 << 10)}


def nearest_better(
    storage_form: StorageForm, moved: int, channels: int, decisions: dict[str, Decision]
) -> Better | None:
    """Return the nearest streaming form that moves fewer bytes than ``moved``, for a weight that does not stream.

    Return None if no form moves fewer bytes. The nearest form has the fewest bits per element that are not below the
    present bits. If all forms have fewer bits, it has the most bits. Sparse forms are considered only for weights that
    are sparse already. ``moved`` is 0 for a refused weight; it is then compared as a dense weight.
    """
    present_bytes = storage_form.dense_bytes if moved == 0 else moved
    sparse = storage_form.category == SPARSE or storage_form.codec in _CSR
    better = []
    for label, candidate in candidates(storage_form.elements, channels, storage_form.nonzeros):
        decision = decisions[label]
        if not decision.streams or (candidate.category == SPARSE) != sparse or _special(label, storage_form):
            continue
        candidate_bytes = moved_bytes(candidate, decision)
        if candidate_bytes < present_bytes:
            better.append((label, _bits(candidate), candidate_bytes))
    if not better:
        return None
    enough = [item for item in better if item[1] >= _bits(storage_form)]
    label, _, candidate_bytes = (
        min(enough, key=lambda item: item[1]) if enough else max(better, key=lambda item: (item[1], -item[2]))
    )
    return Better(label, candidate_bytes, _exact(storage_form, label))


def _special(label: str, storage_form: StorageForm) -> bool:
    """Return whether a candidate has several codebooks, or vectors or blocks, that ``storage_form`` does not have."""
    return " " in label and not (label.startswith("palette4 per") and storage_form.codebooks > 1)


def _bits(storage_form: StorageForm) -> int:
    return storage_form.inner.bits if storage_form.inner is not None else storage_form.bits


def _exact(storage_form: StorageForm, label: str) -> bool:
    if storage_form.codec in _CSR:
        return label == "sparse"
    one_scale = storage_form.category == INTEGER and storage_form.scales == 1
    return (
        one_scale
        and label.startswith("palette")
        and " " not in label
        and int(label.removeprefix("palette")) >= storage_form.bits
    )
