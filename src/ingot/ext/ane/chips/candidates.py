"""Forms that a weight could have: which of them stream on a chip, and the nearest better than the present one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ingot.ext.ane.chips.chips import Chip
from ingot.ext.ane.chips.cost import moved_bytes
from ingot.ext.ane.chips.form import BLOCKWISE, DENSE, INTEGER, PALETTE, SPARSE, Form
from ingot.ext.ane.chips.gates import Conditions, Decision, decide
from ingot.model.layouts.sparse import CooLayout, CsrLayout

_WIDTHS = (1, 2, 3, 4, 6, 8)
# channels per codebook, and columns per scale, that coremltools's users take most
_GROUP = 16
_BLOCK = 32
_CSR = (CsrLayout.codec, CooLayout.codec)


@dataclass(frozen=True, slots=True)
class Better:
    """A form that moves fewer bytes: its label, those bytes, and whether it can hold the same values.

    ``exact`` is True only where every value survives in fp16: integers with one scale become a palette of their codes,
    lists of positions a mask. All else has to be measured, by ``ingot plan --suggest`` or ``ingot convert``.
    """

    label: str
    moved: int
    exact: bool


def candidates(elements: int, channels: int, nonzeros: int | None = None) -> Iterator[tuple[str, Form]]:
    """Yield label and form of the ways to store a matrix of ``elements`` with ``channels`` rows.

    ``nonzeros`` are kept in the sparse ones, half of all by default.
    """
    yield "dense", Form(DENSE, elements)
    yield "int8", Form(INTEGER, elements, 8, scales=channels)
    for bits in _WIDTHS:
        yield f"palette{bits}", Form(PALETTE, elements, bits)
    groups = max(1, channels // _GROUP)
    yield f"palette4 per {_GROUP} channels", Form(PALETTE, elements, 4, codebooks=max(groups, 2))
    yield "palette4 in pairs", Form(PALETTE, elements, 4, vector=2)
    kept = elements // 2 if nonzeros is None else nonzeros
    yield "sparse", Form(SPARSE, elements, nonzeros=kept)
    yield "sparse+palette4", Form(SPARSE, elements, nonzeros=kept, inner=Form(PALETTE, elements, 4))
    yield "sparse+int8", Form(SPARSE, elements, nonzeros=kept, inner=Form(INTEGER, elements, 8), scales=channels)
    yield f"blockwise8 of {_BLOCK}", Form(BLOCKWISE, elements, 8, scales=max(1, elements // _BLOCK))


def outcomes(chip: Chip, conditions: Conditions) -> dict[str, Decision]:
    """Return what becomes of every candidate on a chip; it does not depend on the size."""
    return {label: decide(form, chip, conditions) for label, form in candidates(1 << 20, 1 << 10)}


def nearest_better(form: Form, moved: int, channels: int, known: dict[str, Decision]) -> Better | None:
    """Return the streaming form nearest to the present one that moves fewer bytes than ``moved``; None without one.

    For what does not stream. Nearest: the fewest bits that are no fewer than the present ones, else the most bits.
    Zeros are not made: sparse forms are for what is sparse already. ``moved`` is 0 for a refused weight, which
    counts as dense.
    """
    now = form.dense_bytes if moved == 0 else moved
    sparse = form.kind == SPARSE or form.codec in _CSR
    better = []
    for label, other in candidates(form.elements, channels, form.nonzeros):
        decision = known[label]
        if not decision.streams or (other.kind == SPARSE) != sparse or _special(label, form):
            continue
        cost = moved_bytes(other, decision)
        if cost < now:
            better.append((label, _bits(other), cost))
    if not better:
        return None
    enough = [item for item in better if item[1] >= _bits(form)]
    label, _, cost = (
        min(enough, key=lambda item: item[1]) if enough else max(better, key=lambda item: (item[1], -item[2]))
    )
    return Better(label, cost, _exact(form, label))


def _special(label: str, form: Form) -> bool:
    """Whether a candidate needs more than its width to be chosen: several codebooks, vectors."""
    return " " in label and not (label.startswith("palette4 per") and form.codebooks > 1)


def _bits(form: Form) -> int:
    return form.inner.bits if form.inner is not None else form.bits


def _exact(form: Form, label: str) -> bool:
    if form.codec in _CSR:
        return label == "sparse"
    one_scale = form.kind == INTEGER and form.scales == 1
    return (
        one_scale
        and label.startswith("palette")
        and " " not in label
        and int(label.removeprefix("palette")) >= form.bits
    )
