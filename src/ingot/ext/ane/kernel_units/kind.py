"""What a unit's kernel format comes to, and what the header has to say if it is of that format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ingot.errors import FormatError, IngotError
from ingot.ext.ane.chips import kernel_format as formats
from ingot.ext.ane.chips.activation import ENTRIES
from ingot.ext.ane.chips.descriptor import DETECT_ZEROS, KernelKind, kernel_word
from ingot.ext.ane.kernel_units.header import ASYMMETRIC, BLOCKS, MOST_UNITY, RECORD, SPARSE, Header

NUMPY = {"half": "<f2", "int8": "i1", "uint8": "u1"}
PLAIN = {formats.FP16: "<f2", formats.INT8: "i1", formats.E4M3: "u1"}


@dataclass(frozen=True, slots=True)
class Kind:
    """What a unit's kernel format comes to: bits of a stored value, type of it or of a codebook's entries."""

    bits: int
    entry: str
    palette: bool
    unity: bool


def kind_of(header: Header, where: str) -> Kind:
    """Return what a unit holds, after its header was checked against that, sizes of sections included.

    Raises ``FormatError``: ``anek.kind``, ``anek.header``, ``anek.version``, ``anek.records``.
    """

    def refuse(rule: str, expected: str, found: object = "otherwise") -> FormatError:
        return FormatError(rule, f"expected {expected}, found {found}", where=where)

    kind = _kind(header, refuse)
    if header.version > 1 and not _told(header, kind):
        raise refuse("anek.header", "a kernel word that fits the format", f"{header.word:#x}")
    if header.ocg % header.vector or (header.flags & SPARSE and header.vector > 1):
        raise refuse("anek.kind", "groups of whole vectors, and single entries under a mask")
    for name, sizes in _sizes(header, kind).items():
        if header.sections[name].length not in sizes:
            wanted = " or ".join(str(size) for size in sizes)
            rule = "anek.records" if name == "ocgs" else "anek.kind"
            raise refuse(rule, f"section {name} of {wanted} bytes", header.sections[name].length)
    if header.scale_dtype == "f32" and header.version == 1:
        raise refuse("anek.version", "version 2 with scales of f32", "version 1")
    if header.sections["lut"].length and header.version == 1:
        raise refuse("anek.version", "version 2 with an activation table", "version 1")
    return kind


def _kind(header: Header, refuse: Callable[..., FormatError]) -> Kind:
    code, unity = header.kernel_format, formats.is_unity(header.kernel_format)
    try:
        entry, palette = formats.underlying_type(code), formats.is_palette(code)
        bits = 16 if unity and entry == "half" else 8 if unity else formats.bit_depth(code)
    except IngotError:
        bits, entry, palette = 0, "", False
    if not (palette and entry in NUMPY) and code not in PLAIN and not unity:
        raise refuse("anek.kind", "fp16, int8, e4m3, unity or a palette of them", f"kernel format {code}")
    plain, flags = not palette, header.flags & (ASYMMETRIC | BLOCKS)
    if (flags and (code != formats.INT8 or flags == ASYMMETRIC | BLOCKS)) or (unity and header.flags):
        raise refuse("anek.kind", "zero points or blocks of int8, and neither of an identity", header.flags)
    if unity and not header.channels == header.per_channel <= MOST_UNITY:
        raise refuse("anek.kind", f"an identity of {MOST_UNITY} channels at most", header.channels)
    if (plain and (header.vector > 1 or header.codebooks > 1)) or header.vector == 3:
        raise refuse("anek.kind", "vectors of 1, 2 or 4, and codebooks in palettes alone")
    if header.channels % header.codebooks or header.channels // header.codebooks % header.vector:
        raise refuse("anek.kind", "channels that the codebooks share evenly")
    return Kind(bits, entry, palette, unity)


def _told(header: Header, kind: Kind) -> bool:
    """Whether the kernel word is that of the format, detection of zeros apart."""
    sparse, zero = bool(header.flags & SPARSE), bool(header.flags & ASYMMETRIC)
    described = KernelKind(kind.entry, kind.bits if kind.palette else None, sparse, zero, header.vector)
    try:
        return header.word & ~DETECT_ZEROS == kernel_word(described, header.target, detect_zeros=False)
    except IngotError:
        return False


def _sizes(header: Header, kind: Kind) -> dict[str, tuple[int, ...]]:
    """Return the bytes that each section may have, but for the weights."""
    scales = (4 if header.scale_dtype == "f32" else 2) * header.channels * header.scales
    zeros = header.channels if header.flags & ASYMMETRIC else 0
    given = bool(header.flags & (ASYMMETRIC | BLOCKS))
    tables = formats.palette_lut_bytes(header.kernel_format, header.codebooks, header.vector) if kind.palette else 0
    return {
        "lut": (0, 2 * ENTRIES),
        "pal": (tables,),
        "ocgs": (RECORD * -(-header.channels // header.ocg),),
        "scale": (scales + zeros,) if given else (0, scales),
        "bias": (0, 2 * header.channels),
    }
