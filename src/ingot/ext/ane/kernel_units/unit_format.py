"""Decode the kernel format of a unit, and check that the header fits it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ingot.errors import FormatError, IngotError
from ingot.ext.ane.chips import kernel_format as formats
from ingot.ext.ane.chips.activation import ENTRIES
from ingot.ext.ane.chips.descriptor import DETECT_ZEROS, KernelKind, kernel_word
from ingot.ext.ane.kernel_units.header import ASYMMETRIC, BLOCKS, MAX_UNITY, RECORD, SPARSE, Header

NUMPY = {"half": "<f2", "int8": "i1", "uint8": "u1"}
PLAIN = {formats.FP16: "<f2", formats.INT8: "i1", formats.E4M3: "u1"}


@dataclass(frozen=True, slots=True)
class UnitFormat:
    """Decoded kernel format of a unit.

    ``bits`` are the bits of a stored value; ``entry`` is the type of the values, or of the codebook entries if
    ``palette`` is true. ``unity`` is true for a multiple of the identity matrix.
    """

    bits: int
    entry: str
    palette: bool
    unity: bool


def unit_format(header: Header, location: str) -> UnitFormat:
    """Return the decoded kernel format of a unit, after checking that all other fields of the header fit it.

    Raises ``FormatError``: ``anek.kind``, ``anek.header``, ``anek.version``, ``anek.records``.
    """

    def refuse(rule: str, expected: str, actual: object = None) -> FormatError:
        return FormatError(
            rule, f"expected {expected}" + ("" if actual is None else f", found {actual}"), where=location
        )

    decoded = _decode_format(header, refuse)
    if header.version > 1 and not _word_fits(header, decoded):
        raise refuse("anek.header", "a kernel word that fits the kernel format", f"{header.word:#x}")
    if header.ocg % header.vector or (header.flags & SPARSE and header.vector > 1):
        raise refuse("anek.kind", "groups that vectors divide, and no vectors in a sparse unit")
    for name, sizes in _sizes(header, decoded).items():
        if header.sections[name].length not in sizes:
            allowed = " or ".join(str(size) for size in sizes)
            rule = "anek.records" if name == "ocgs" else "anek.kind"
            raise refuse(rule, f"section {name} of {allowed} bytes", header.sections[name].length)
    if header.scale_dtype == "f32" and header.version == 1:
        raise refuse("anek.version", "version 2, because the scales are f32", "version 1")
    if header.sections["lut"].length and header.version == 1:
        raise refuse("anek.version", "version 2, because there is an activation table", "version 1")
    return decoded


def _decode_format(header: Header, refuse: Callable[..., FormatError]) -> UnitFormat:
    code = header.kernel_format
    unity = formats.is_unity(header.kernel_format)
    try:
        entry = formats.underlying_type(code)
        palette = formats.is_palette(code)
        bits = 16 if unity and entry == "half" else 8 if unity else formats.bit_depth(code)
    except IngotError:
        bits = 0
        entry = ""
        palette = False
    if not (palette and entry in NUMPY) and code not in PLAIN and not unity:
        raise refuse("anek.kind", "fp16, int8, e4m3, an identity or a palette of these types", f"kernel format {code}")
    plain = not palette
    flags = header.flags & (ASYMMETRIC | BLOCKS)
    if (flags and (code != formats.INT8 or flags == ASYMMETRIC | BLOCKS)) or (unity and header.flags):
        raise refuse(
            "anek.kind", "zero points or blocks for int8 only, not both, and no flags for an identity", header.flags
        )
    if unity and not header.channels == header.per_channel <= MAX_UNITY:
        raise refuse("anek.kind", f"an identity of at most {MAX_UNITY} channels", header.channels)
    if (plain and (header.vector > 1 or header.codebooks > 1)) or header.vector == 3:
        raise refuse("anek.kind", "vectors of 1, 2 or 4 values, and vectors and codebooks only for palettes")
    if header.channels % header.codebooks or header.channels // header.codebooks % header.vector:
        raise refuse("anek.kind", "the same number of channels, a multiple of the vector size, for each codebook")
    return UnitFormat(bits, entry, palette, unity)


def _word_fits(header: Header, unit_format: UnitFormat) -> bool:
    """Return whether the KernelCfg register in the header fits the kernel format.

    Its bit for the detection of zeros is ignored.
    """
    sparse = bool(header.flags & SPARSE)
    zero = bool(header.flags & ASYMMETRIC)
    kernel_format = KernelKind(
        unit_format.entry, unit_format.bits if unit_format.palette else None, sparse, zero, header.vector
    )
    try:
        return header.word & ~DETECT_ZEROS == kernel_word(kernel_format, header.target, detect_zeros=False)
    except IngotError:
        return False


def _sizes(header: Header, unit_format: UnitFormat) -> dict[str, tuple[int, ...]]:
    """Return the allowed sizes in bytes of each section, except the weights."""
    scales = (4 if header.scale_dtype == "f32" else 2) * header.channels * header.scales
    zeros = header.channels if header.flags & ASYMMETRIC else 0
    requires_scales = bool(header.flags & (ASYMMETRIC | BLOCKS))
    tables = (
        formats.palette_lut_bytes(header.kernel_format, header.codebooks, header.vector) if unit_format.palette else 0
    )
    return {
        "lut": (0, 2 * ENTRIES),
        "pal": (tables,),
        "ocgs": (RECORD * -(-header.channels // header.ocg),),
        "scale": (scales + zeros,) if requires_scales else (0, scales),
        "bias": (0, 2 * header.channels),
    }
