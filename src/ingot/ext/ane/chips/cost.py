"""Compute the cost of a weight after its decision: moved bytes, time, and memory on the chip.

The time of a layer is ``floor + max(moved bytes / bandwidth, multiplications / mac_rate)``; ``spec/ane-times.md``
compares it with measurements. The floor counts once per dispatch, so all weights of a program share it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ingot.ext.ane.chips.chips import Cell, Chip, weakest
from ingot.ext.ane.chips.descriptor import multiplications_left
from ingot.ext.ane.chips.gates import ORDINARY, Conditions, Decision
from ingot.ext.ane.chips.storage_form import PALETTE, SPARSE, StorageForm


@dataclass(frozen=True, slots=True)
class Time:
    """The time of a weight in milliseconds, and its evidence.

    ``floor`` is the time of a dispatch, which all weights of the dispatch share. ``share`` is the time of the weight in
    addition to it.

    ``bound`` names the cause of the share: ``bytes`` that move, the ``decoder`` of palettes, or ``multiplications``.
    """

    share: float
    floor: float
    evidence: str
    source: str
    bound: str = "bytes"

    @property
    def alone(self) -> float:
        """Milliseconds of a program that has only this weight."""
        return self.floor + self.share


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory that a weight takes on the chip: the limit of a tile in bytes, a tile's size in bytes, the number of
    passes.

    ``working_set`` states whether all moved bytes fit in the chip's working set.
    """

    cap: int
    tile_bytes: int
    passes: int
    working_set: bool


def moved_bytes(storage_form: StorageForm, decision: Decision) -> int:
    """Return the number of bytes that move to the engine for a weight.

    It is the number of stored bytes if the weight streams, 0 if the chip refuses it, and otherwise 2 per element.
    """
    if decision.outcome == "refused":
        return 0
    if not decision.streams:
        return storage_form.dense_bytes
    if decision.stored_bits is not None:
        return widened(storage_form, decision.stored_bits).streamed_bytes
    return storage_form.streamed_bytes


def widened(storage_form: StorageForm, bits: int) -> StorageForm:
    """Return the storage form of a palette, or of a sparse palette, with indices of ``bits``."""
    if storage_form.inner is not None:
        return replace(storage_form, inner=widened(storage_form.inner, bits))
    return replace(storage_form, bits=bits)


def rate(storage_form: StorageForm, decision: Decision, chip: Chip) -> Cell | None:
    """Return the bandwidth at which a weight's bytes move, in 10**9 bytes per second; None if it is not published."""
    keys = ["bandwidth"]
    if decision.streams:
        inner = storage_form.inner.category if storage_form.inner is not None else None
        if storage_form.category == SPARSE:
            keys = ["bandwidth_sparse_palette" if inner == PALETTE else "bandwidth_sparse", "bandwidth_sparse", *keys]
    published = (chip.published(key) for key in keys)
    return next((cell for cell in published if cell is not None), None)


def predict(
    storage_form: StorageForm, decision: Decision, chip: Chip, conditions: Conditions = ORDINARY
) -> Time | None:
    """Return the predicted time of a layer on ``chip``.

    Returns None if the chip refuses the weight, or if no bandwidth is published.
    """
    bandwidth = rate(storage_form, decision, chip)
    floor = chip.published("floor")
    if bandwidth is None or decision.outcome == "refused":
        return None
    cells = [bandwidth] if floor is None else [bandwidth, floor]
    milliseconds = moved_bytes(storage_form, decision) / (float(bandwidth.value) * 1e6)
    bound = "bytes"
    decoder = chip.published("palette_rate") if storage_form.category == PALETTE and decision.streams else None
    if decoder is not None and storage_form.elements / (float(decoder.value) * 1e6) > milliseconds:
        milliseconds = storage_form.elements / (float(decoder.value) * 1e6)
        cells = [decoder, *cells[1:]]
        bound = "decoder"
    multiplication_time = multiplications(storage_form, chip, conditions)
    if multiplication_time is not None and multiplication_time[0] > milliseconds:
        milliseconds = multiplication_time[0]
        cells = [*multiplication_time[1], *cells[1:]]
        bound = "multiplications"
    return Time(
        milliseconds, 0.0 if floor is None else float(floor.value), weakest(cells).evidence, cells[0].source, bound
    )


def multiplications(storage_form: StorageForm, chip: Chip, conditions: Conditions) -> tuple[float, list[Cell]] | None:
    """Return the milliseconds of a layer's multiplications, and the cells from which they follow.

    Returns None if no rate of multiplications is published.

    The formula is ``weights * positions * share / mac_rate``: the compiler's count of cycles is proportional to
    channels, kernel size and positions (B18). The share is below 1 if the chip skips zeros of a sparse weight.
    """
    speed = chip.published("mac_rate")
    if speed is None:
        return None
    share, skipped = multiplications_left(storage_form.density, chip)
    macs = storage_form.elements * conditions.positions * share
    return macs / (float(speed.value) * 1e6), [speed, skipped] if storage_form.category == SPARSE else [speed]


def budget(storage_form: StorageForm, decision: Decision, chip: Chip) -> Budget:
    """Return the memory that a weight takes on the chip; the limit is ``streamed_cap`` if it streams, else
    ``dense_cap``.

    The limit applies to the size of one weight tile (per Neural Engine core, as the M6 study measured it). If a tile
    exceeds the limit, the engine needs several passes.
    """
    relaxed = decision.streams and bool(chip.value("gate_master"))
    cap = int(chip.value("streamed_cap" if relaxed else "dense_cap"))
    moved = moved_bytes(storage_form, decision)
    tile = -(-moved // int(chip.value("weight_tiles")))
    return Budget(cap, tile, max(1, -(-tile // cap)), moved <= int(chip.value("working_set")))


def tables_fit(storage_form: StorageForm, chip: Chip, activation_bytes: int = 0) -> bool:
    """Return whether the palette's tables and the activation table together fit in the chip's budget.

    Raises
    ------
    UnsupportedError
        ``ane.unknown-cell``: the budget is not published; assume ``palette_lut_budget=BYTES``.
    """
    return storage_form.table_bytes + activation_bytes <= int(chip.value("palette_lut_budget"))
