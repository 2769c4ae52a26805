"""Decide whether the engine may compute a convolution with the Winograd algorithm (claims B20, B25).

Conditions of B20: the enable bit is set; the weights are not E4M3, uint8, unity or sparse; one kernel axis is 3 and the
other below 6; there is no depth axis; the stride is 1; a group of output channels has enough work. According to FT and
the M6 study, the feature does nothing before H17 (``chips.contradictions()["winograd"]``).
"""

from __future__ import annotations

from dataclasses import dataclass

from ingot.ext.ane.chips.chips import Chip
from ingot.ext.ane.chips.descriptor import winograd_cell
from ingot.ext.ane.chips.gates import ORDINARY, Conditions
from ingot.ext.ane.chips.storage_form import PALETTE, SPARSE, StorageForm


@dataclass(frozen=True, slots=True)
class Eligibility:
    """Whether Winograd is possible; ``reason`` is the first condition that fails, or empty.

    ``work`` is the work of a group of output channels, which must be at least ``floor``. ``tiles`` are pairs of the
    sizes of an output and an input tile that the hardware has. A pair reduces the multiplications by a factor of ``(3 *
    output / input) ** 2``.
    """

    eligible: bool
    reason: str
    evidence: str
    work: int
    floor: int
    tiles: tuple[tuple[int, int], ...]


def winograd(
    storage_form: StorageForm, kernel: tuple[int, int], chip: Chip, conditions: Conditions = ORDINARY, *, ocg: int = 16
) -> Eligibility:
    """Return whether the engine may use Winograd for a convolution with this weight.

    Parameters
    ----------
    storage_form : StorageForm
        Storage form of the weight.
    kernel : (int, int)
        Height and width.
    chip : Chip
    conditions : Conditions
    ocg : int
        Output channels per group. The work is ``ocg * height * width * 2``; it must be at least 16, or 8 for integer
        kernels (``data/descriptor.toml``). Packed modes, whose limit is 32, cannot be recognized from a weight.
    """
    enabled = chip.cell("winograd")
    integer = storage_form.category in ("int", "blockwise")
    height, width = kernel
    floor = int(winograd_cell("floor_integer" if integer else "floor_float").value)
    work = ocg * height * width * 2
    tiles = tuple((int(output), int(size)) for output, size in winograd_cell("tiles").value)
    for holds, reason in (
        (bool(chip.value("winograd")), "the chip has no Winograd"),
        (storage_form.category != SPARSE, "a sparse weight keeps its own datapath"),
        (_underlying(storage_form) not in ("e4m3", "uint8"), f"weights of {_underlying(storage_form)} are excluded"),
        (3 in kernel and max(kernel) < 6, f"a {height} x {width} kernel: one axis has to be 3, the other below 6"),
        (conditions.stride == 1, "unit stride only"),
        (conditions.dilation == 1, "no dilation"),
        (work >= floor, f"too little work per group of output channels: {work}, below {floor}"),
    ):
        if not holds:
            return Eligibility(False, reason, enabled.evidence, work, floor, tiles)
    return Eligibility(True, "", enabled.evidence, work, floor, tiles)


def _underlying(storage_form: StorageForm) -> str:
    if storage_form.category == "fp8":
        return storage_form.entry
    return storage_form.entry if storage_form.category == PALETTE else "half"
