"""Record layouts of packed weights: they split records into streams for entropy coding (``spec/packed.md``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from ingot.core.bytes.record_layout import (
    BYTE,
    CENTERED,
    HALF,
    MAGNITUDE,
    NO_KEY,
    RATIO,
    SOURCE_BITS,
    Field,
    RecordLayout,
    Stream,
)
from ingot.core.numeric.dtypes import DTYPES
from ingot.model.layouts import affine, palette, scaled_codebook
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.ggml import TYPES, GgmlBlocksLayout
from ingot.model.layouts.packed_ints import PackedIntLayout
from ingot.model.layouts.palette import PaletteLayout
from ingot.model.layouts.scaled_codebook import ScaledCodebookLayout
from ingot.model.spec import PartSpec, TensorSpec

_PLAIN = 64  # bytes of a record without known structure
_CODE_PARTS: Mapping[str, tuple[str, ...]] = {
    AffineLayout.codec: (affine.CODES,),
    PackedIntLayout.codec: (affine.CODES, affine.ZEROS),
    ScaledCodebookLayout.codec: (scaled_codebook.INDICES,),
    PaletteLayout.codec: (palette.INDICES,),
}


class _Builder:
    """A record layout under construction, to which ``stream`` and ``field`` add."""

    def __init__(self, record: int) -> None:
        self._record = record
        self._streams: list[Stream] = []
        self._fields: list[Field] = []
        self._width = 0

    def stream(
        self,
        length: int,
        unit: int | None = None,
        *,
        pairs: bool = False,
        key: int = NO_KEY,
        first: int = 0,
        second: int = 0,
    ) -> tuple[int, int]:
        """Add a stream; return its index and the position of its first byte in the divided record."""
        self._streams.append(Stream(length, unit or length, pairs, key, first, second))
        self._width += length
        return len(self._streams) - 1, self._width - length

    def field(
        self, source: int, target: int, count: int, *, shifts: tuple[int, int] = (0, 0), bits: int = 8, side: int = 0
    ) -> None:
        """Add a field; ``shifts`` are the bit shifts in source and target."""
        self._fields.append(Field(source, target, count, *shifts, bits, side))

    def copied(self, source: int, count: int, *, pairs: bool = False) -> int:
        """Add a stream of bytes that keep their order; return its index."""
        index, start = self.stream(count, pairs=pairs)
        self.field(source, start, count)
        return index

    def half(self, source: int) -> tuple[int, int]:
        """Add the streams of a 16-bit float; return the indices of the low and the high byte."""
        high = self.copied(source + 1, 1)
        low, start = self.stream(1, key=BYTE, first=high)
        self.field(source, start, 1)
        return low, high

    def layout(self) -> RecordLayout:
        """Return the finished layout."""
        return RecordLayout(self._record, tuple(self._streams), tuple(self._fields))


def record_layout(spec: TensorSpec, part: PartSpec) -> RecordLayout:
    """Return the record layout of a part that will be written."""
    if spec.codec == GgmlBlocksLayout.codec and spec.params.get("type") in TYPES:
        return _block_layout(str(spec.params["type"]))
    bits = spec.params.get("bits")
    if part.role in _CODE_PARTS.get(spec.codec, ()) and isinstance(bits, int):
        return _code_layout(bits, DTYPES[part.dtype].bits // 8)
    return _dtype_layout(part.type or part.dtype)


@cache
def _code_layout(bits: int, item: int) -> RecordLayout:
    """Return the record layout of codes of ``bits`` bits in storage elements of ``item`` bytes."""
    if bits not in (3, 5, 6, 7):
        builder = _Builder(_PLAIN)
        builder.copied(0, _PLAIN, pairs=bits == 4)
        return builder.layout()
    builder = _Builder(bits * item)
    for byte in range(bits * item):  # codes cross bytes, each byte at other positions
        builder.copied(byte, 1)
    return builder.layout()


@cache
def _dtype_layout(name: str) -> RecordLayout:
    """Return the record layout of plain numbers: a stream for each byte.

    Exception: the 8 bits of an exponent of bf16 or f32 are one stream, although they are in two bytes.
    """
    width = max(1, DTYPES[name].bits // 8) if name in DTYPES else 1
    if width == 1:
        builder = _Builder(_PLAIN)
        builder.copied(0, _PLAIN)
        return builder.layout()
    builder = _Builder(width)
    if name == "f16":
        builder.half(0)
        return builder.layout()
    remaining = width
    if name in ("bf16", "f32"):
        remaining = width - 2
        exponent = builder.stream(1)[1]
        builder.field(width - 1, exponent, 1, shifts=(0, 1), bits=7)
        builder.field(width - 2, exponent, 1, shifts=(7, 0), bits=1)
        mantissa = builder.stream(1)[1]
        builder.field(width - 2, mantissa, 1, bits=7)
        builder.field(width - 1, mantissa, 1, shifts=(7, 7), bits=1)
    for byte in reversed(range(remaining)):
        builder.copied(byte, 1)
    return builder.layout()


def _nibbles(scale_bytes: int, *, minimum: bool = False) -> RecordLayout:
    """Return the record layout of blocks: an f16 scale, an f16 minimum if ``minimum`` is true, and 16 bytes of codes.

    Each byte contains two codes.
    """
    builder = _Builder(scale_bytes + 16)
    low, high = builder.half(0)
    if minimum:
        _minimum(builder, 2, high)
    _, codes = builder.stream(16, pairs=True, key=HALF, first=low, second=high)
    builder.field(scale_bytes, codes, 16)
    return builder.layout()


def _minimum(builder: _Builder, source: int, scale_high: int) -> None:
    """Add the streams of an f16 minimum, whose high byte depends on that of the scale."""
    high, start = builder.stream(1, key=BYTE, first=scale_high)
    builder.field(source + 1, start, 1)
    _, start = builder.stream(1, key=BYTE, first=high)
    builder.field(source, start, 1)


def _five_bits(*, minimum: bool) -> RecordLayout:
    """Return the record layout of Q5_0 and Q5_1: 32 codes whose fifth bits are in a bit array."""
    head = 4 if minimum else 2
    builder = _Builder(head + 20)
    low, high = builder.half(0)
    if minimum:
        _minimum(builder, 2, high)
    _, codes = builder.stream(32, key=HALF, first=low, second=high)
    builder.field(head + 4, codes, 16, bits=4)
    builder.field(head + 4, codes + 16, 16, shifts=(4, 0), bits=4)
    builder.field(head, codes, 32, shifts=(0, 4), bits=1, side=SOURCE_BITS)
    return builder.layout()


def _q8_0() -> RecordLayout:
    builder = _Builder(34)
    low, high = builder.half(0)
    _, codes = builder.stream(32, key=HALF, first=low, second=high)
    builder.field(2, codes, 32)
    return builder.layout()


def _six_bit_scales(builder: _Builder) -> tuple[int, int]:
    """Add the streams of the packed scales and minima of Q4_K and Q5_K; return the indices of both."""
    _, high = builder.half(0)
    _minimum(builder, 2, high)
    scales, start = builder.stream(8)
    minima, minimum = builder.stream(8, 1, key=BYTE, first=scales)
    builder.field(4, start, 4, bits=6)
    builder.field(4, start + 4, 4, shifts=(6, 4), bits=2)
    builder.field(12, start + 4, 4, bits=4)
    builder.field(8, minimum, 4, bits=6)
    builder.field(8, minimum + 4, 4, shifts=(6, 4), bits=2)
    builder.field(12, minimum + 4, 4, shifts=(4, 0), bits=4)
    return scales, minima


def _q4_k() -> RecordLayout:
    builder = _Builder(144)
    scales, minima = _six_bit_scales(builder)
    _, codes = builder.stream(128, 16, pairs=True, key=RATIO, first=scales, second=minima)
    for group in range(4):
        for half in range(2):  # of the 32 bytes: the first half becomes low bits, the second one high bits
            source = 16 + 32 * group + 16 * half
            builder.field(source, codes + 32 * group, 16, shifts=(0, 4 * half), bits=4)
            builder.field(source, codes + 32 * group + 16, 16, shifts=(4, 4 * half), bits=4)
    return builder.layout()


def _q5_k() -> RecordLayout:
    builder = _Builder(176)
    scales, minima = _six_bit_scales(builder)
    _, codes = builder.stream(256, 32, key=RATIO, first=scales, second=minima)
    for block in range(8):
        builder.field(48 + 32 * (block // 2), codes + 32 * block, 32, shifts=(4 * (block % 2), 0), bits=4)
        builder.field(16, codes + 32 * block, 32, shifts=(block, 4), bits=1)
    return builder.layout()


def _q6_k() -> RecordLayout:
    builder = _Builder(210)
    builder.half(208)
    scales = builder.copied(192, 16)
    _, codes = builder.stream(256, 16, key=MAGNITUDE, first=scales)
    for half in range(2):
        for quarter in range(4):
            target = codes + 128 * half + 32 * quarter
            builder.field(64 * half + 32 * (quarter % 2), target, 32, shifts=(4 * (quarter // 2), 0), bits=4)
            builder.field(128 + 32 * half, target, 32, shifts=(2 * quarter, 4), bits=2)
    return builder.layout()


def _q3_k() -> RecordLayout:
    builder = _Builder(110)
    builder.half(108)
    builder.copied(96, 12)
    _, codes = builder.stream(128, pairs=True)
    for half in range(2):
        for quarter in range(4):
            target = codes + 64 * half + 32 * (quarter // 2)
            shift = 4 * (quarter % 2)
            builder.field(32 + 32 * half, target, 32, shifts=(2 * quarter, shift), bits=2)
            builder.field(0, target, 32, shifts=(4 * half + quarter, shift + 2), bits=1)
    return builder.layout()


def _q2_k() -> RecordLayout:
    builder = _Builder(84)
    _, high = builder.half(80)
    _minimum(builder, 82, high)
    builder.copied(0, 16, pairs=True)
    builder.copied(16, 64)
    return builder.layout()


def _iq4_xs() -> RecordLayout:
    """Return the record layout of IQ4_XS.

    Scales and codes of blocks with even indices precede those of blocks with odd indices.
    """
    builder = _Builder(136)
    builder.half(0)
    scales, start = builder.stream(8)
    builder.field(4, start, 4, bits=4)
    builder.field(4, start + 4, 4, shifts=(4, 0), bits=4)
    _, codes = builder.stream(128, 16, pairs=True, key=CENTERED, first=scales)
    for block in range(8):
        position = 4 * (block % 2) + block // 2
        builder.field(2 + block // 4, start + position, 1, shifts=(2 * (block % 4), 4), bits=2)
        builder.field(8 + 16 * block, codes + 16 * position, 16)
    return builder.layout()


def _mxfp4() -> RecordLayout:
    builder = _Builder(17)
    scale = builder.copied(0, 1)
    _, codes = builder.stream(16, pairs=True, key=BYTE, first=scale)
    builder.field(1, codes, 16)
    return builder.layout()


def _nvfp4() -> RecordLayout:
    builder = _Builder(36)
    scales = builder.copied(0, 4)
    _, codes = builder.stream(32, 8, pairs=True, key=BYTE, first=scales)
    builder.field(4, codes, 32)
    return builder.layout()


_BLOCKS: Mapping[str, Callable[[], RecordLayout]] = {
    "q4_0": lambda: _nibbles(2),
    "iq4_nl": lambda: _nibbles(2),
    "q4_1": lambda: _nibbles(4, minimum=True),
    "q5_0": lambda: _five_bits(minimum=False),
    "q5_1": lambda: _five_bits(minimum=True),
    "q8_0": _q8_0,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "iq4_xs": _iq4_xs,
    "mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
}


@cache
def _block_layout(name: str) -> RecordLayout:
    """Return the record layout of a type of ggml's blocks.

    For a type without a function in ``_BLOCKS``, only 16-bit scales at the beginning or end have separate streams.
    """
    if name in _BLOCKS:
        return _BLOCKS[name]()
    size = TYPES[name].nbytes
    halves = [start for start, width in TYPES[name].wide if width == 2 and start in (0, size - 2)]
    builder = _Builder(size)
    for start in halves:
        builder.half(start)
    first = 2 if 0 in halves else 0
    builder.copied(first, (size - 2 if size - 2 in halves else size) - first)
    return builder.layout()
