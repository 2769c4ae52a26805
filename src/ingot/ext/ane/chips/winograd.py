"""Whether a convolution may run as Winograd, and why a compressed weight may not (B20, B25).

Eligible by B20: the enable bit; weights that are neither E4M3 nor uint8, nor unity, nor sparse; one kernel axis 3 and
the other below 6; no depth; unit stride; enough work per group of output channels. FT and the M6 study find it a stub
before H17 (``chips.contradictions()["winograd"]``).
"""

from __future__ import annotations

from dataclasses import dataclass

from ingot.ext.ane.chips.chips import Chip
from ingot.ext.ane.chips.descriptor import winograd_cell
from ingot.ext.ane.chips.form import PALETTE, SPARSE, Form
from ingot.ext.ane.chips.gates import ORDINARY, Conditions


@dataclass(frozen=True, slots=True)
class Eligibility:
    """Whether Winograd is possible, and the first condition that fails (empty where none does).

    ``work`` is what has to reach ``floor``. ``tiles`` are the output and input tiles that the array has; a tile saves
    ``(3 * output / input) ** 2`` of the multiplications.
    """

    eligible: bool
    reason: str
    evidence: str
    work: int
    floor: int
    tiles: tuple[tuple[int, int], ...]


def winograd(
    form: Form, kernel: tuple[int, int], chip: Chip, conditions: Conditions = ORDINARY, *, ocg: int = 16
) -> Eligibility:
    """Return whether a convolution with this weight may run as Winograd.

    Parameters
    ----------
    form : Form
        Of the weight.
    kernel : (int, int)
        Height and width.
    chip : Chip
    conditions : Conditions
    ocg : int
        Output channels per group; the work is ``ocg * height * width * 2`` and has to reach 16, or 8 where the kernel
        is no float (``data/descriptor.toml``; the floor 32 of packed modes is not told from a weight).
    """
    enabled = chip.cell("winograd")
    integer = form.kind in ("int", "blockwise")
    height, width = kernel
    floor = int(winograd_cell("floor_integer" if integer else "floor_float").value)
    work = ocg * height * width * 2
    tiles = tuple((int(output), int(size)) for output, size in winograd_cell("tiles").value)
    for holds, reason in (
        (bool(chip.value("winograd")), "the chip has no Winograd"),
        (form.kind != SPARSE, "a sparse weight keeps its own datapath"),
        (_underlying(form) not in ("e4m3", "uint8"), f"weights of {_underlying(form)} are excluded"),
        (3 in kernel and max(kernel) < 6, f"a {height} x {width} kernel: one axis has to be 3, the other below 6"),
        (conditions.stride == 1, "unit stride only"),
        (conditions.dilation == 1, "no dilation"),
        (work >= floor, f"too little work per group of output channels: {work}, below {floor}"),
    ):
        if not holds:
            return Eligibility(False, reason, enabled.evidence, work, floor, tiles)
    return Eligibility(True, "", enabled.evidence, work, floor, tiles)


def _underlying(form: Form) -> str:
    if form.kind == "fp8":
        return form.entry
    return form.entry if form.kind == PALETTE else "half"
