"""What is published of descriptors and registers, from ``data/descriptor.toml`` (``spec/ane-registers.md``).

Kernel DMA streams (table 25.4), the slots of a group's record, the word that tells a kernel's format, type numbers, the
multiplications that are left of a sparse kernel. What is not known well enough is not here but listed on the page.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import log2
from typing import Any

import numpy as np

from ingot.errors import UnsupportedError
from ingot.ext.ane.chips.chips import Cell, Chip, data


@dataclass(frozen=True, slots=True)
class Stream:
    """A coefficient stream: the section that it carries, its registers, and where FT has the first one from H16 on."""

    name: str
    section: str
    enable: int
    base: int
    relocation: int
    later: int
    evidence: str
    source: str


@dataclass(frozen=True, slots=True)
class KernelKind:
    """What the kernel word tells: ``entry`` half, int8, uint8 or e4m3; ``palette_bits`` None without a palette."""

    entry: str = "half"
    palette_bits: int | None = None
    sparse: bool = False
    zero_point: bool = False
    vector: int = 1


@cache
def streams() -> Mapping[str, Stream]:
    """Return the four streams by the section of a kernel unit that they carry."""
    rows = data("descriptor")["streams"]
    by_name = {}
    for name, row in rows.items():
        enable, base, relocation = row["registers"]
        evidence = row["evidence"]
        source = row["source"]
        by_name[row["section"]] = Stream(name, row["section"], enable, base, relocation, row["later"], evidence, source)
    return by_name


@cache
def slots() -> tuple[str, ...]:
    """Return what the ten slots of a record are for; which is which is not published."""
    return tuple(data("descriptor")["slots"]["names"])


@cache
def type_numbers() -> Mapping[str, int]:
    """Return the known type numbers of a descriptor by the type's name."""
    return {name: int(row["number"]) for name, row in data("descriptor")["types"].items()}


def winograd_cell(key: str) -> Cell:
    """Return a row of Winograd's: ``tiles``, ``floor_float``, ``floor_integer`` or ``floor_packed``."""
    row = data("descriptor")["winograd"][key]
    return Cell(row["value"], row["evidence"], row["source"], row.get("contradiction"))


DETECT_ZEROS = 1 << 28
"""Bit of the kernel word that no format of a kernel tells."""


def kernel_word(kind: KernelKind, target: str, detect_zeros: bool) -> int:
    """Return the KernelCfg register of a kernel: format, palette, bits, sparsity, zero points, vectors, zero detection.

    Bits of an element are 8 without a palette, whatever the type, as compilers write it. Fields that a generation's
    register does not have are left out.

    Raises
    ------
    UnsupportedError
        ``ane.refused``: a format for which the two bits have no code on this generation, which is what the compiler
        asserts of E4M3 (B25).
    """
    generation, described = generation_of(target), data("descriptor")
    code = described["format_codes"][kind.entry]
    if code["since"] > generation:
        raise UnsupportedError(
            f"expected a format that the register of {target} has a code for, found {kind.entry}", rule="ane.refused"
        )
    values = {
        "format": int(code["value"]),
        "palette_enable": int(kind.palette_bits is not None),
        "element_bits": 8 if kind.palette_bits is None else kind.palette_bits,
        "sparse": int(kind.sparse),
        "asymmetric": int(kind.zero_point),
        "vector": int(log2(kind.vector)),
        "detect_zeros": int(detect_zeros and not kind.sparse),
    }
    fields = described["kernel_word"]
    return sum(value << fields[name]["low"] for name, value in values.items() if fields[name]["since"] <= generation)


def generation_of(target: str) -> int:
    """Return the number of a target's generation: 13 of ``H13g``."""
    match = re.match(r"[Hh](\d+)", target)
    if match is None:
        raise UnsupportedError(f"expected a target like H13, found {target!r}", rule="ane.chip")
    return int(match.group(1))


def multiplications_left(density: float, chip: Chip) -> tuple[float, Cell]:
    """Return the share of a sparse kernel's multiplications that are done at ``density`` (kept over all), and why.

    Measured on two chips; elsewhere the compiler's rule, the share that is kept, where the chip detects zeros. The
    implicit zeros that strides and padding add have no published formula and are left out.
    """
    rows: Mapping[str, Mapping[str, Any]] = data("descriptor")["zero_skip"]
    row = rows.get(chip.name, rows["rule"])
    cell = Cell(row["points"], row["evidence"], row["source"])
    if "needs" in row:
        switch = chip.cell(row["needs"])
        if not switch.value:
            return 1.0, switch
        cell = Cell(row["points"], row["evidence"], row["source"], switch.contradiction)
    kept, left = zip(*row["points"], strict=True)
    return float(np.interp(density, kept, left)), cell
