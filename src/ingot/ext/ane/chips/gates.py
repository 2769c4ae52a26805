"""Whether a form streams in its stored bytes, folds to dense fp16, or is refused, and which gate says so (B25, B7).

The order of questions: does the engine have the form (legality); is the weight one that may stream (master gate and its
conditions); did somebody see what becomes of this form on this chip, or do sources contradict each other; else the
format's own gate. ``spec/ane.md`` has the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ingot.ext.ane.chips.chips import ASSUMED, Cell, Chip, weakest
from ingot.ext.ane.chips.form import BLOCKWISE, DENSE, FOREIGN, FP8, INTEGER, PALETTE, SPARSE, Form

VECTOR_MASK = 0x36
"""Legal vector sizes are those whose bit is set: 1, 2, 4, 5 (B25); 5 has no encoding in the register (DC)."""
ENCODABLE_VECTORS = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the master gate asks of the weight's use; a checkpoint does not say it, so ordinary layers are taken.

    ``stride`` and ``dilation`` are the largest over all axes. ``tile_overlap``: tiles of the input overlap.
    ``mutable``: the weight is trained in place. ``positions``: how many columns are multiplied with the weight in one
    dispatch: batch times height times width of a convolution's output, tokens of a matrix.
    """

    stride: int = 1
    dilation: int = 1
    tile_overlap: bool = False
    mutable: bool = False
    positions: int = 1


ORDINARY = Conditions()


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a weight: ``dense``, ``streams``, ``folds`` or ``refused``; the gate that decided, and why.

    ``evidence`` is the weakest that the decision rests on, with its ``source``; ``contradictions`` are keys into
    ``chips.contradictions()``.
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


def decide(form: Form, chip: Chip, conditions: Conditions = ORDINARY) -> Decision:
    """Return what becomes of a weight in ``form`` on ``chip``.

    Raises
    ------
    UnsupportedError
        ``ane.unknown-cell``: a gate that nobody has published decides; assume a value to go on.
    """
    for question in (_no_form, _assumed, _illegal, _master, _held_back):
        answer = question(form, chip, conditions)
        if answer is not None:
            return answer
    return _seen(form, chip) or _gated(form, chip)


def _decision(outcome: str, gate: str, reason: str, cells: Sequence[Cell], bits: int | None = None) -> Decision:
    cell = weakest(cells)
    keys = dict.fromkeys(item.contradiction for item in cells if item.contradiction is not None)
    return Decision(outcome, gate, reason, cell.evidence, cell.source, tuple(keys), bits)


_CHAPTER = Cell(None, "decompiled", "B25")


def _no_form(form: Form, chip: Chip, conditions: Conditions) -> Decision | None:
    if form.kind == DENSE:
        return _decision("dense", "none", "plain values, moved as fp16", [_CHAPTER])
    if form.kind == FOREIGN:
        return _decision(
            "folds", "kernel-format", f"the engine has no form like {form.codec}: decoded first", [_CHAPTER]
        )
    misfit = form.misfit or (form.inner.misfit if form.inner is not None else "")
    if misfit:
        return _decision("folds", "layout", f"{misfit}: decoded first", [_CHAPTER])
    if form.kind == FP8 and form.entry == "e5m2":
        reason = "E5M2 is the upper byte of fp16: folded on the way in (B36)"
        return _decision("folds", "dma-convertible", reason, [_CHAPTER])
    return None


def _assumed(form: Form, chip: Chip, conditions: Conditions) -> Decision | None:
    """Answer what the user says of this form; what is said of the layer, such as its stride, says more."""
    cell = chip.outcomes.get(form.label)
    if cell is None or cell.evidence != ASSUMED:
        return None
    if cell.value == "streams" and form.kind in (INTEGER, BLOCKWISE) and _not_int8(form, chip) is not None:
        return None  # zero points are a cell of their own
    held = _held_back(form, chip, conditions) if cell.value == "streams" else None
    return held or _outcome(form, chip, cell)


def _illegal(form: Form, chip: Chip, conditions: Conditions) -> Decision | None:
    if form.kind == FP8 and not chip.value("gate_e4m3"):
        reason = "no E4M3 before H18: the compiler asserts"
        return _decision("refused", "gate_e4m3 (0x52d)", reason, [chip.cell("gate_e4m3")])
    inner = form.inner if form.kind == SPARSE else form
    if inner is None:
        return None
    decision = _illegal_palette(inner, chip) if inner.kind == PALETTE else None
    if decision is not None or form.kind != SPARSE:
        return decision
    if inner.kind == PALETTE and not chip.value("sparse_binary"):
        return _decision(
            "refused",
            "sparse_binary",
            "the descriptor cannot pack sparse palette indices",
            [chip.cell("sparse_binary")],
        )
    return None


def _illegal_palette(form: Form, chip: Chip) -> Decision | None:
    width = chip.known(f"palette_width_{form.bits}")
    if width is None or width.value == "refused":
        cells = [width or _CHAPTER]
        return _decision("refused", "palette-width", f"indices of {form.bits} bits are not legal here", cells)
    if not legal_vector(form.vector):
        return _decision(
            "refused", "vector mask 0x36", f"vectors of {form.vector} are not legal or encodable", [_CHAPTER]
        )
    if form.entry != "half" and form.bits == 8:
        return _decision("refused", "quantized-palette", "a quantized palette has fewer than 256 entries", [_CHAPTER])
    if form.entry == "e4m3" and not chip.value("gate_e4m3"):
        return _decision("refused", "gate_e4m3 (0x52d)", "no E4M3 entries before H18", [chip.cell("gate_e4m3")])
    for key, asked, what in (
        ("multi_palette", form.codebooks > 1, "the descriptor has one codebook per weight"),
        ("vector_palette", form.vector > 1, "the descriptor has no vector palettes"),
    ):
        if asked and not chip.value(key):
            return _decision("refused", key, what, [chip.cell(key)])
    return None


def legal_vector(size: int) -> bool:
    """Whether a palette may have vectors of this size: in the mask 0x36, and with an encoding."""
    return 0 <= size <= 5 and bool(1 << size & VECTOR_MASK) and size in ENCODABLE_VECTORS


def _master(form: Form, chip: Chip, conditions: Conditions) -> Decision | None:
    """Answer the byte at 0x48f."""
    if chip.value("gate_master"):
        return None
    return _decision("folds", "gate_master (0x48f)", "this chip streams no kernels", [chip.cell("gate_master")])


def _held_back(form: Form, chip: Chip, conditions: Conditions) -> Decision | None:
    """Answer what the master gate asks of the layer."""
    for fails, gate, reason in (
        (conditions.stride != 1, "stride", "a kernel streams at unit stride on all axes"),
        (conditions.dilation != 1, "dilation", "a kernel streams without dilation"),
        (conditions.tile_overlap, "tile-overlap", "a kernel streams where tiles do not overlap"),
        (conditions.mutable, "mutable", "a weight that is trained in place does not stream"),
    ):
        if fails:
            return _decision("folds", gate, reason, [_CHAPTER])
    if form.kind == SPARSE and form.nonzeros == form.elements and form.elements:
        return _decision("folds", "density", "a mask without a zero is compiled dense", [Cell(None, "measured", "M6")])
    return None


def _seen(form: Form, chip: Chip) -> Decision | None:
    """Answer from what somebody saw of this form, or from what sources contradict each other about.

    A gate that the user assumes is asked instead.
    """
    label = f"{BLOCKWISE}8" if form.kind == BLOCKWISE else form.label  # nobody told widths apart
    cell = chip.outcomes.get(label)
    gate = _GATES.get(form.kind)
    if cell is None or (gate is not None and chip.cell(gate).evidence == ASSUMED):
        return None
    if form.kind in (INTEGER, BLOCKWISE) and _not_int8(form, chip) is not None:
        return None
    plain = form if form.inner is None else form.inner
    if plain.kind == PALETTE and plain.entry != "half":
        return None
    return _outcome(form, chip, cell)


_GATES = {FP8: "gate_e4m3", PALETTE: "gate_palette", BLOCKWISE: "gate_blockwise", INTEGER: "gate_affine"}


def _outcome(form: Form, chip: Chip, cell: Cell) -> Decision:
    reason = {"streams": "moves in its stored bytes", "folds": "becomes dense fp16 before it moves"}
    # What was seen were single codebooks of single elements: that the width is legal there needs no other evidence.
    cells = [cell, *_beyond_plain(form, chip)] if cell.value == "streams" and cell.evidence != ASSUMED else [cell]
    outcome = str(cell.value)
    said = ASSUMED if cell.evidence == ASSUMED else "seen"
    gate = f"{said}: {form.label if said == ASSUMED or form.kind != BLOCKWISE else f'{BLOCKWISE}8'}"
    return _decision(outcome, gate, reason.get(outcome, "is refused"), cells, _stored_bits(form, chip))


def _gated(form: Form, chip: Chip) -> Decision:
    if form.kind == FP8:
        return _by_gate(form, chip, "gate_e4m3", "0x52d", "no E4M3 on this chip")
    if form.kind == PALETTE:
        return _by_gate(form, chip, "gate_palette", "0x529", "the palette gate is clear")
    if form.kind == BLOCKWISE:
        refused = _not_int8(form, chip)
        return refused or _by_gate(form, chip, "gate_blockwise", "0x520 to 0x539", "no blockwise stream on this chip")
    if form.kind == INTEGER:
        refused = _not_int8(form, chip)
        return refused or _by_gate(form, chip, "gate_affine", "0x528 to 0x537", "dequantized to dense on this chip")
    if form.inner is not None and form.inner.kind in (INTEGER, BLOCKWISE):
        return _sparse_integers(form, form.inner, chip)
    cells = [chip.cell("gate_master"), *_rests_on(form, chip)]
    reason = "mask and values are an operand of their own"
    return _decision("streams", "gate_master (0x48f)", reason, cells, _stored_bits(form, chip))


def _by_gate(form: Form, chip: Chip, key: str, offset: str, closed: str) -> Decision:
    gate = f"{key} ({offset})"
    if not chip.value(key):
        return _decision("folds", gate, closed, [chip.cell(key)])
    cells = [chip.cell("gate_master"), chip.cell(key), *_rests_on(form, chip)]
    return _decision("streams", gate, "moves in its stored bytes", cells, _stored_bits(form, chip))


def _not_int8(form: Form, chip: Chip) -> Decision | None:
    """Return why integers are not those that the engine dequantizes itself, else None."""
    if form.bits != 8:
        reason = f"the engine has no {form.bits}-bit integers; {form.bits}-bit weights are palettes"
        return _decision("folds", "underlying-type", reason, [_CHAPTER])
    if form.zero_point and form.kind == BLOCKWISE:
        return _decision("folds", "zero-points", "blocks have no zero points", [_CHAPTER])
    if form.zero_point and not chip.value("asymmetric"):
        return _decision("folds", "asymmetric", "the descriptor has no zero points", [chip.cell("asymmetric")])
    return None


def _sparse_integers(form: Form, inner: Form, chip: Chip) -> Decision:
    """Integers among zeros: nobody has published what becomes of them; taken to need both gates."""
    alone = _not_int8(inner, chip) or _seen(inner, chip) or _gated(inner, chip)
    cells = [Cell(None, "inferred", "as the integers alone, with the master gate")]
    keys = alone.contradictions
    decision = _decision(alone.outcome, alone.gate, f"{alone.reason}; for sparse integers inferred", cells)
    return Decision(decision.outcome, decision.gate, decision.reason, decision.evidence, decision.source, keys)


def _rests_on(form: Form, chip: Chip) -> list[Cell]:
    """Return the cells of legality that a form that streams rests on."""
    inner = form.inner if form.kind == SPARSE else form
    if inner is None or inner.kind != PALETTE:
        return _beyond_plain(form, chip)
    cells = [chip.cell(f"palette_width_{inner.bits}"), *_beyond_plain(form, chip)]
    return [*cells, chip.cell("sparse_binary")] if form.kind == SPARSE else cells


def _beyond_plain(form: Form, chip: Chip) -> list[Cell]:
    inner = form if form.inner is None else form.inner
    cells = [chip.cell("multi_palette")] if inner.codebooks > 1 else []
    cells += [chip.cell("vector_palette")] if inner.vector > 1 else []
    return [*cells, chip.cell("asymmetric")] if inner.zero_point else cells


def _stored_bits(form: Form, chip: Chip) -> int | None:
    """Return the width that indices are stored with on the chip where it is another than theirs: 3 bits as 4."""
    inner = form if form.inner is None else form.inner
    if inner.kind == PALETTE and chip.value(f"palette_width_{inner.bits}") == "as 4 bits":
        return 4
    return None
