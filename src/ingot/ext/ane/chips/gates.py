"""Decide whether a storage form streams in its stored bytes, folds to dense fp16, or is refused (claims B25, B7).

There are four checks, in this order. Does the engine have the form (legality)? May the weight stream (the master gate
and its conditions)? Was an outcome of the form on this chip observed, or do sources contradict each other about it?
Otherwise the gate of the form decides. ``spec/ane.md`` has the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ingot.ext.ane.chips.chips import ASSUMED, Cell, Chip, weakest
from ingot.ext.ane.chips.storage_form import BLOCKWISE, DENSE, FOREIGN, FP8, INTEGER, PALETTE, SPARSE, StorageForm

VECTOR_MASK = 0x36
"""Bit n is set if vectors of n elements are legal (B25): 1, 2, 4 and 5. The register has no encoding for 5 (DC)."""
ENCODABLE_VECTORS = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Conditions:
    """The properties of a layer on which the master gate depends.

    A checkpoint does not contain them; the defaults are the properties of ordinary layers.

    ``stride`` and ``dilation`` are the largest over all axes. ``tile_overlap`` states whether tiles of the input
    overlap, and ``mutable`` whether the weight is trained in place. ``positions`` is the number of columns that one
    dispatch multiplies with the weight: batch times height times width of a convolution's output, or tokens of a
    matrix.
    """

    stride: int = 1
    dilation: int = 1
    tile_overlap: bool = False
    mutable: bool = False
    positions: int = 1


ORDINARY = Conditions()


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome for a weight, the gate that decided it, and the reason.

    The outcome is ``dense``, ``streams``, ``folds`` (becomes dense fp16) or ``refused``.

    ``evidence`` is the weakest class of evidence among the values that decided, and ``source`` its source.
    ``contradictions`` are keys into ``chips.contradictions()``. ``stored_bits`` is the width of stored indices if the
    chip widens them, else None.
    """

    outcome: str
    gate: str
    reason: str
    evidence: str
    source: str
    contradictions: tuple[str, ...] = ()
    stored_bits: int | None = None

    @property
    def streams(self) -> bool:
        return self.outcome == "streams"


def decide(storage_form: StorageForm, chip: Chip, conditions: Conditions = ORDINARY) -> Decision:
    """Return the outcome for a weight with this storage form on a chip.

    Raises
    ------
    UnsupportedError
        ``ane.unknown-cell``: the deciding gate is not published; assume a value to continue.
    """
    for check in (_without_form, _assumed, _illegal, _master, _layer_conditions):
        decision = check(storage_form, chip, conditions)
        if decision is not None:
            return decision
    return _observed(storage_form, chip) or _by_format_gate(storage_form, chip)


def _decision(outcome: str, gate: str, reason: str, cells: Sequence[Cell], bits: int | None = None) -> Decision:
    cell = weakest(cells)
    keys = dict.fromkeys(item.contradiction for item in cells if item.contradiction is not None)
    return Decision(outcome, gate, reason, cell.evidence, cell.source, tuple(keys), bits)


_CHAPTER = Cell(None, "decompiled", "B25")


def _without_form(storage_form: StorageForm, chip: Chip, conditions: Conditions) -> Decision | None:
    if storage_form.category == DENSE:
        return _decision("dense", "none", "plain values, moved as fp16", [_CHAPTER])
    if storage_form.category == FOREIGN:
        return _decision(
            "folds", "kernel-format", f"the engine has no form like {storage_form.codec}: decoded first", [_CHAPTER]
        )
    misfit = storage_form.misfit or (storage_form.inner.misfit if storage_form.inner is not None else "")
    if misfit:
        return _decision("folds", "layout", f"{misfit}: decoded first", [_CHAPTER])
    if storage_form.category == FP8 and storage_form.entry == "e5m2":
        reason = "E5M2 is the upper byte of fp16: folded on the way in (B36)"
        return _decision("folds", "dma-convertible", reason, [_CHAPTER])
    return None


def _assumed(storage_form: StorageForm, chip: Chip, conditions: Conditions) -> Decision | None:
    """Return the decision with the outcome that the user assumes for this form; None if the user assumes no outcome.

    A condition of the layer that prevents streaming takes precedence.
    """
    cell = chip.outcomes.get(storage_form.label)
    if cell is None or cell.evidence != ASSUMED:
        return None
    if (
        cell.value == "streams"
        and storage_form.category in (INTEGER, BLOCKWISE)
        and _why_not_int8(storage_form, chip) is not None
    ):
        return None  # zero points have a separate cell
    layer_decision = _layer_conditions(storage_form, chip, conditions) if cell.value == "streams" else None
    return layer_decision or _outcome(storage_form, chip, cell)


def _illegal(storage_form: StorageForm, chip: Chip, conditions: Conditions) -> Decision | None:
    if storage_form.category == FP8 and not chip.value("gate_e4m3"):
        reason = "no E4M3 before H18: the compiler asserts"
        return _decision("refused", "gate_e4m3 (0x52d)", reason, [chip.cell("gate_e4m3")])
    inner = storage_form.inner if storage_form.category == SPARSE else storage_form
    if inner is None:
        return None
    decision = _illegal_palette(inner, chip) if inner.category == PALETTE else None
    if decision is not None or storage_form.category != SPARSE:
        return decision
    if inner.category == PALETTE and not chip.value("sparse_binary"):
        return _decision(
            "refused",
            "sparse_binary",
            "the descriptor cannot pack sparse palette indices",
            [chip.cell("sparse_binary")],
        )
    return None


def _illegal_palette(storage_form: StorageForm, chip: Chip) -> Decision | None:
    width = chip.published(f"palette_width_{storage_form.bits}")
    if width is None or width.value == "refused":
        cells = [width or _CHAPTER]
        return _decision("refused", "palette-width", f"indices of {storage_form.bits} bits are not legal here", cells)
    if not legal_vector(storage_form.vector):
        return _decision(
            "refused", "vector mask 0x36", f"vectors of {storage_form.vector} are not legal or encodable", [_CHAPTER]
        )
    if storage_form.entry != "half" and storage_form.bits == 8:
        return _decision("refused", "quantized-palette", "a quantized palette has fewer than 256 entries", [_CHAPTER])
    if storage_form.entry == "e4m3" and not chip.value("gate_e4m3"):
        return _decision("refused", "gate_e4m3 (0x52d)", "no E4M3 entries before H18", [chip.cell("gate_e4m3")])
    for key, is_used, reason in (
        ("multi_palette", storage_form.codebooks > 1, "the descriptor has one codebook per weight"),
        ("vector_palette", storage_form.vector > 1, "the descriptor has no vector palettes"),
    ):
        if is_used and not chip.value(key):
            return _decision("refused", key, reason, [chip.cell(key)])
    return None


def legal_vector(size: int) -> bool:
    """Return whether palette entries may be vectors of ``size`` elements.

    The size must be in ``ENCODABLE_VECTORS``, and bit ``size`` must be set in ``VECTOR_MASK``.
    """
    return 0 <= size <= 5 and bool(1 << size & VECTOR_MASK) and size in ENCODABLE_VECTORS


def _master(storage_form: StorageForm, chip: Chip, conditions: Conditions) -> Decision | None:
    """Return the decision to fold if the chip's master gate, the byte at 0x48f, is clear; otherwise None."""
    if chip.value("gate_master"):
        return None
    return _decision("folds", "gate_master (0x48f)", "this chip streams no kernels", [chip.cell("gate_master")])


def _layer_conditions(storage_form: StorageForm, chip: Chip, conditions: Conditions) -> Decision | None:
    """Return the decision to fold if the layer does not meet a condition of the master gate; otherwise None."""
    for fails, gate, reason in (
        (conditions.stride != 1, "stride", "a kernel streams at unit stride on all axes"),
        (conditions.dilation != 1, "dilation", "a kernel streams without dilation"),
        (conditions.tile_overlap, "tile-overlap", "a kernel streams where tiles do not overlap"),
        (conditions.mutable, "mutable", "a weight that is trained in place does not stream"),
    ):
        if fails:
            return _decision("folds", gate, reason, [_CHAPTER])
    if storage_form.category == SPARSE and storage_form.nonzeros == storage_form.elements and storage_form.elements:
        return _decision("folds", "density", "a mask without a zero is compiled dense", [Cell(None, "measured", "M6")])
    return None


def _observed(storage_form: StorageForm, chip: Chip) -> Decision | None:
    """Return the outcome of this form if it was observed, or if sources contradict each other about it; else None.

    Also return None if the user assumes a value for the form's gate, because then the gate decides.
    """
    label = (
        f"{BLOCKWISE}8" if storage_form.category == BLOCKWISE else storage_form.label
    )  # the sources do not distinguish widths
    cell = chip.outcomes.get(label)
    gate = _GATES.get(storage_form.category)
    if cell is None or (gate is not None and chip.cell(gate).evidence == ASSUMED):
        return None
    if storage_form.category in (INTEGER, BLOCKWISE) and _why_not_int8(storage_form, chip) is not None:
        return None
    plain = storage_form if storage_form.inner is None else storage_form.inner
    if plain.category == PALETTE and plain.entry != "half":
        return None
    return _outcome(storage_form, chip, cell)


_GATES = {FP8: "gate_e4m3", PALETTE: "gate_palette", BLOCKWISE: "gate_blockwise", INTEGER: "gate_affine"}


def _outcome(storage_form: StorageForm, chip: Chip, cell: Cell) -> Decision:
    reason = {"streams": "moves in its stored bytes", "folds": "becomes dense fp16 before it moves"}
    # The observed palettes had one codebook of single elements; they also prove that the width is legal.
    cells = (
        [cell, *_variant_cells(storage_form, chip)] if cell.value == "streams" and cell.evidence != ASSUMED else [cell]
    )
    outcome = str(cell.value)
    origin = ASSUMED if cell.evidence == ASSUMED else "seen"
    is_any_width = origin != ASSUMED and storage_form.category == BLOCKWISE
    gate = f"{origin}: {f'{BLOCKWISE}8' if is_any_width else storage_form.label}"
    return _decision(outcome, gate, reason.get(outcome, "is refused"), cells, _stored_bits(storage_form, chip))


def _by_format_gate(storage_form: StorageForm, chip: Chip) -> Decision:
    if storage_form.category == FP8:
        return _by_gate(storage_form, chip, "gate_e4m3", "0x52d", "no E4M3 on this chip")
    if storage_form.category == PALETTE:
        return _by_gate(storage_form, chip, "gate_palette", "0x529", "the palette gate is clear")
    if storage_form.category == BLOCKWISE:
        refused = _why_not_int8(storage_form, chip)
        return refused or _by_gate(
            storage_form, chip, "gate_blockwise", "0x520 to 0x539", "no blockwise stream on this chip"
        )
    if storage_form.category == INTEGER:
        refused = _why_not_int8(storage_form, chip)
        return refused or _by_gate(
            storage_form, chip, "gate_affine", "0x528 to 0x537", "dequantized to dense on this chip"
        )
    if storage_form.inner is not None and storage_form.inner.category in (INTEGER, BLOCKWISE):
        return _sparse_integers(storage_form, storage_form.inner, chip)
    cells = [chip.cell("gate_master"), *_legality_cells(storage_form, chip)]
    reason = "mask and values are an operand of their own"
    return _decision("streams", "gate_master (0x48f)", reason, cells, _stored_bits(storage_form, chip))


def _by_gate(storage_form: StorageForm, chip: Chip, key: str, offset: str, closed: str) -> Decision:
    gate = f"{key} ({offset})"
    if not chip.value(key):
        return _decision("folds", gate, closed, [chip.cell(key)])
    cells = [chip.cell("gate_master"), chip.cell(key), *_legality_cells(storage_form, chip)]
    return _decision("streams", gate, "moves in its stored bytes", cells, _stored_bits(storage_form, chip))


def _why_not_int8(storage_form: StorageForm, chip: Chip) -> Decision | None:
    """Return the decision to fold, with the reason, if the engine cannot dequantize these integers; otherwise None."""
    if storage_form.bits != 8:
        reason = f"the engine has no {storage_form.bits}-bit integers; {storage_form.bits}-bit weights are palettes"
        return _decision("folds", "underlying-type", reason, [_CHAPTER])
    if storage_form.zero_point and storage_form.category == BLOCKWISE:
        return _decision("folds", "zero-points", "blocks have no zero points", [_CHAPTER])
    if storage_form.zero_point and not chip.value("asymmetric"):
        return _decision("folds", "asymmetric", "the descriptor has no zero points", [chip.cell("asymmetric")])
    return None


def _sparse_integers(storage_form: StorageForm, inner: StorageForm, chip: Chip) -> Decision:
    """Return the decision for sparse integers.

    Their outcome is not published. It is inferred to be that of the same integers without a mask.
    """
    without_zeros = _why_not_int8(inner, chip) or _observed(inner, chip) or _by_format_gate(inner, chip)
    cells = [Cell(None, "inferred", "as the integers alone, with the master gate")]
    keys = without_zeros.contradictions
    decision = _decision(
        without_zeros.outcome, without_zeros.gate, f"{without_zeros.reason}; for sparse integers inferred", cells
    )
    return Decision(decision.outcome, decision.gate, decision.reason, decision.evidence, decision.source, keys)


def _legality_cells(storage_form: StorageForm, chip: Chip) -> list[Cell]:
    """Return the cells that state whether the engine has this form; a decision to stream depends on all of them."""
    inner = storage_form.inner if storage_form.category == SPARSE else storage_form
    if inner is None or inner.category != PALETTE:
        return _variant_cells(storage_form, chip)
    cells = [chip.cell(f"palette_width_{inner.bits}"), *_variant_cells(storage_form, chip)]
    return [*cells, chip.cell("sparse_binary")] if storage_form.category == SPARSE else cells


def _variant_cells(storage_form: StorageForm, chip: Chip) -> list[Cell]:
    inner = storage_form if storage_form.inner is None else storage_form.inner
    cells = [chip.cell("multi_palette")] if inner.codebooks > 1 else []
    cells += [chip.cell("vector_palette")] if inner.vector > 1 else []
    return [*cells, chip.cell("asymmetric")] if inner.zero_point else cells


def _stored_bits(storage_form: StorageForm, chip: Chip) -> int | None:
    """Return the bits of stored indices if the chip widens them (3 bits are stored as 4), else None."""
    inner = storage_form if storage_form.inner is None else storage_form.inner
    if inner.category == PALETTE and chip.value(f"palette_width_{inner.bits}") == "as 4 bits":
        return 4
    return None
