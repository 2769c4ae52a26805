"""Published facts about task descriptors and registers, from ``data/descriptor.toml`` (``spec/ane-registers.md``).

They are the kernel DMA streams (table 25.4), the slots of a group's record, the KernelCfg register, type numbers, and
the share of multiplications that a sparse kernel needs. The page lists the facts that are too uncertain to be used.
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
    """A coefficient stream: the section of a kernel unit that it moves, and the addresses of its registers.

    ``later`` is the address of its first register in generation H16 and later generations, according to FT.
    """

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
    """Contents of the KernelCfg register. ``entry`` is half, int8, uint8 or e4m3; ``palette_bits`` is None if there is
    no palette.
    """

    entry: str = "half"
    palette_bits: int | None = None
    sparse: bool = False
    zero_point: bool = False
    vector: int = 1


@cache
def streams() -> Mapping[str, Stream]:
    """Return the four streams, keyed by the section of a kernel unit that each moves."""
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
    """Return the purposes of the ten slots of a record; their order is not published."""
    return tuple(data("descriptor")["slots"]["names"])


@cache
def type_numbers() -> Mapping[str, int]:
    """Return the published type numbers of descriptors, keyed by the name of the type."""
    return {name: int(row["number"]) for name, row in data("descriptor")["types"].items()}


def winograd_cell(key: str) -> Cell:
    """Return the cell ``key`` about Winograd: ``tiles``, ``floor_float``, ``floor_integer`` or ``floor_packed``."""
    row = data("descriptor")["winograd"][key]
    return Cell(row["value"], row["evidence"], row["source"], row.get("contradiction"))


DETECT_ZEROS = 1 << 28
"""Bit of the KernelCfg register that does not depend on the kernel's format."""


def kernel_word(kernel_kind: KernelKind, target: str, detect_zeros: bool) -> int:
    """Return the value of the KernelCfg register for a kernel.

    Its fields are format, palette, bits, sparsity, zero points, vectors and zero detection.

    If there is no palette, the field for the bits of an element is 8 for every type, as in compiled programs. Fields
    that the register of a generation does not have are omitted.

    Raises
    ------
    UnsupportedError
        ``ane.refused``: the register of this generation has no code for the format. For E4M3, the compiler asserts the
        same (B25).
    """
    generation = generation_of(target)
    descriptor = data("descriptor")
    code = descriptor["format_codes"][kernel_kind.entry]
    if code["since"] > generation:
        raise UnsupportedError(
            f"expected a format that the register of {target} has a code for, found {kernel_kind.entry}",
            rule="ane.refused",
        )
    values = {
        "format": int(code["value"]),
        "palette_enable": int(kernel_kind.palette_bits is not None),
        "element_bits": 8 if kernel_kind.palette_bits is None else kernel_kind.palette_bits,
        "sparse": int(kernel_kind.sparse),
        "asymmetric": int(kernel_kind.zero_point),
        "vector": int(log2(kernel_kind.vector)),
        "detect_zeros": int(detect_zeros and not kernel_kind.sparse),
    }
    fields = descriptor["kernel_word"]
    return sum(value << fields[name]["low"] for name, value in values.items() if fields[name]["since"] <= generation)


def generation_of(target: str) -> int:
    """Return the number of a target's generation: 13 for ``H13g``."""
    match = re.match(r"[Hh](\d+)", target)
    if match is None:
        raise UnsupportedError(f"expected a target like H13, found {target!r}", rule="ane.chip")
    return int(match.group(1))


def multiplications_left(density: float, chip: Chip) -> tuple[float, Cell]:
    """Return the share of multiplications that a sparse kernel of this density needs, and the cell from which it
    follows.

    The share was measured on two chips. For other chips that detect zeros, it is the density (nonzeros over all
    elements), as in the compiler. Zeros that strides and padding add are ignored, because no formula is published.
    """
    rows: Mapping[str, Mapping[str, Any]] = data("descriptor")["zero_skip"]
    row = rows.get(chip.name, rows["rule"])
    cell = Cell(row["points"], row["evidence"], row["source"])
    if "needs" in row:
        switch = chip.cell(row["needs"])
        if not switch.value:
            return 1.0, switch
        cell = Cell(row["points"], row["evidence"], row["source"], switch.contradiction)
    densities, shares = zip(*row["points"], strict=True)
    return float(np.interp(density, densities, shares)), cell
