"""Bytes that move, time, and room on chip: what a weight costs once it is known whether it streams.

Time of a layer: ``floor + max(moved bytes / bandwidth, multiplications / mac_rate)`` (``spec/ane-times.md`` has what
people measured beside). The floor is paid once per dispatch, so that weights of one program share it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ingot.ext.ane.chips.chips import Cell, Chip, weakest
from ingot.ext.ane.chips.descriptor import multiplications_left
from ingot.ext.ane.chips.form import PALETTE, SPARSE, Form
from ingot.ext.ane.chips.gates import ORDINARY, Conditions, Decision


@dataclass(frozen=True, slots=True)
class Time:
    """Milliseconds: ``share`` without the dispatch, ``floor`` per dispatch; with the evidence of the figures.

    ``bound``: what the share is the time of: ``bytes``, ``decoder`` (of palettes) or ``multiplications``.
    """

    share: float
    floor: float
    evidence: str
    source: str
    bound: str = "bytes"

    @property
    def alone(self) -> float:
        """Milliseconds of a program with this weight and nothing else."""
        return self.floor + self.share


@dataclass(frozen=True, slots=True)
class Budget:
    """Room on chip: the cap in bytes that applies, what each of the tiles holds, and how many passes that takes.

    ``working_set``: whether what moves fits the on-chip working set as a whole.
    """

    cap: int
    tile_bytes: int
    passes: int
    working_set: bool


def moved_bytes(form: Form, decision: Decision) -> int:
    """Return the bytes that cross to the engine: stored ones where it streams, else 2 per element; 0 where refused."""
    if decision.outcome == "refused":
        return 0
    if not decision.streams:
        return form.dense_bytes
    if decision.stored_bits is not None:
        return widened(form, decision.stored_bits).streamed_bytes
    return form.streamed_bytes


def widened(form: Form, bits: int) -> Form:
    """Return a palette, or a sparse one, whose indices are stored with ``bits``: its codebooks grow with them."""
    if form.inner is not None:
        return replace(form, inner=widened(form.inner, bits))
    return replace(form, bits=bits)


def rate(form: Form, decision: Decision, chip: Chip) -> Cell | None:
    """Return the GB/s (10**9 bytes) at which a form moves on a chip; None where nothing is known."""
    keys = ["bandwidth"]
    if decision.streams:
        inner = form.inner.kind if form.inner is not None else None
        if form.kind == SPARSE:
            keys = ["bandwidth_sparse_palette" if inner == PALETTE else "bandwidth_sparse", "bandwidth_sparse", *keys]
    known = (chip.known(key) for key in keys)
    return next((cell for cell in known if cell is not None), None)


def predict(form: Form, decision: Decision, chip: Chip, conditions: Conditions = ORDINARY) -> Time | None:
    """Return the predicted time of a layer; None where refused or no bandwidth is known."""
    bandwidth = rate(form, decision, chip)
    floor = chip.known("floor")
    if bandwidth is None or decision.outcome == "refused":
        return None
    cells = [bandwidth] if floor is None else [bandwidth, floor]
    share = moved_bytes(form, decision) / (float(bandwidth.value) * 1e6)
    bound = "bytes"
    decoder = chip.known("palette_rate") if form.kind == PALETTE and decision.streams else None
    if decoder is not None and form.elements / (float(decoder.value) * 1e6) > share:
        share, cells = form.elements / (float(decoder.value) * 1e6), [decoder, *cells[1:]]
        bound = "decoder"
    done = multiplications(form, chip, conditions)
    if done is not None and done[0] > share:
        share, bound, cells = done[0], "multiplications", [*done[1], *cells[1:]]
    return Time(share, 0.0 if floor is None else float(floor.value), weakest(cells).evidence, cells[0].source, bound)


def multiplications(form: Form, chip: Chip, conditions: Conditions) -> tuple[float, list[Cell]] | None:
    """Return milliseconds of a layer's multiplications, and what they rest on; None where no rate is known.

    ``weights * positions * share that is left / mac_rate``: the compiler's count of cycles is proportional to channels,
    kernel and positions (B18). Zeros of a sparse form are skipped where the chip does.
    """
    speed = chip.known("mac_rate")
    if speed is None:
        return None
    left, skipped = multiplications_left(form.density, chip)
    macs = form.elements * conditions.positions * left
    return macs / (float(speed.value) * 1e6), [speed, skipped] if form.kind == SPARSE else [speed]


def budget(form: Form, decision: Decision, chip: Chip) -> Budget:
    """Return room on chip: ``cap = hal[0x210] if streams and hal[0x48f] else hal[0x200]``, passes where it is exceeded.

    The cap is compared with what one of the chip's weight tiles holds (per NE, as the M6 study measured it).
    """
    relaxed = decision.streams and bool(chip.value("gate_master"))
    cap = int(chip.value("streamed_cap" if relaxed else "dense_cap"))
    moved = moved_bytes(form, decision)
    tile = -(-moved // int(chip.value("weight_tiles")))
    return Budget(cap, tile, max(1, -(-tile // cap)), moved <= int(chip.value("working_set")))


def tables_fit(form: Form, chip: Chip, activation_bytes: int = 0) -> bool:
    """Whether the palette's tables and the activation table share the chip's budget.

    Raises
    ------
    UnsupportedError
        ``ane.unknown-cell``: the budget is not published; assume ``palette_lut_budget=BYTES``.
    """
    return form.table_bytes + activation_bytes <= int(chip.value("palette_lut_budget"))
