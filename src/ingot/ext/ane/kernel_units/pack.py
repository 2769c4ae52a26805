"""Packing a weight into a kernel unit, group by group of output channels, with its tables (``spec/ane-kernels.md``)."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from ingot.errors import UsageError
from ingot.ext.ane.chips import kernel_format as formats
from ingot.ext.ane.chips.activation import ActivationLut
from ingot.ext.ane.chips.bits import pack_lsb
from ingot.ext.ane.chips.chips import Chip
from ingot.ext.ane.chips.descriptor import KernelKind, kernel_word
from ingot.ext.ane.kernel_units.header import (
    ASYMMETRIC,
    BLOCKS,
    HEADER,
    MOST_UNITY,
    RECORD,
    RECORD_WORDS,
    SECTIONS,
    SPARSE,
    UNRELOCATED,
    Header,
    Section,
    aligned,
    groups,
    seal,
)

Array = np.ndarray[Any, np.dtype[Any]]

_ENTRY_TYPES = {"float16": "half", "int8": "int8", "uint8": "uint8"}
_KERNEL_BYTES = 1 << 16  # of one group on one NE (M6)


@dataclass(frozen=True, eq=False)
class KernelWeight:
    """A weight in the form in which it is packed.

    Parameters
    ----------
    shape : tuple of int
        Output channels first.
    values : array
        float16 of ``shape``; int8 of ``shape``; uint8 of ``shape``, the bits of E4M3; with codebooks, indices uint8 of
        [channels / vector, weights per channel]; of an identity nothing.
    bits : int
        Of one value, code or index.
    codebooks : array or None
        [codebooks, 2**bits, vector] of float16, int8 or uint8; codebook j serves the j-th equal run of output channels.
    mask : array of bool or None
        Of the shape of ``values``: True where a value is kept. Where it is False nothing is stored.
    scale, bias : array or None
        float16 [channels]: after the multiplication, ``y = scale * (w' x) + bias``. With ``block`` scales are
        [channels, blocks], each for a run of weights. Scales may be float32.
    lut : ActivationLut or None
    zero : array or None
        int8 [channels] of integers: ``w = scale * (value - zero)``.
    block : int
        Weights of a channel that share a scale, or 0.
    unity : bool
        The weight is the identity times the scales.
    """

    shape: tuple[int, ...]
    values: Array
    bits: int
    codebooks: Array | None = None
    mask: Array | None = None
    scale: Array | None = None
    bias: Array | None = None
    lut: ActivationLut | None = None
    zero: Array | None = None
    block: int = 0
    unity: bool = False

    @property
    def entry(self) -> str:
        """What reaches the multiplier: ``half``, ``int8``, ``uint8`` or ``e4m3``."""
        if self.codebooks is None:
            return {"float16": "half", "int8": "int8"}.get(self.values.dtype.name, "e4m3")
        return _ENTRY_TYPES[self.codebooks.dtype.name]

    @property
    def vector(self) -> int:
        return 1 if self.codebooks is None else int(self.codebooks.shape[2])

    @property
    def kind(self) -> KernelKind:
        """What the kernel word tells of it."""
        bits = None if self.codebooks is None else self.bits
        return KernelKind(self.entry, bits, self.mask is not None, self.zero is not None, self.vector)

    @property
    def kernel_format(self) -> int:
        """Code of the enum; what is sparse has that of its values."""
        if self.unity:
            return formats.unity_code(self.entry)
        if self.codebooks is None:
            return formats.primary_code(self.entry)
        return formats.palette_code(self.bits, self.entry)


def pack_unit(weight: KernelWeight, chip: Chip) -> bytes:
    """Return the bytes of a kernel unit.

    Raises
    ------
    UsageError
        ``ane.layout``: arrays that do not fit the shape, a codebook or vector that cuts a group of channels, a weight
        past 4 GiB; ``ane.budget``: tables past the chip's budget, where that is known.
    UnsupportedError
        ``ane.refused``: a format that the chip's register has no code for.
    """
    _check(weight)
    header = _geometry(weight, chip)
    pieces, records, cursor, tile = [], [], 0, 0
    for of_tile, first, count in groups(header):
        if of_tile != tile:
            pieces.append(bytes(aligned(cursor) - cursor))
            cursor, tile = aligned(cursor), of_tile
        piece = _piece(weight, first, count)
        records.append(struct.pack(f"<{RECORD_WORDS}I", cursor, count, *[UNRELOCATED] * 10, 0, 0))
        pieces.append(piece)
        cursor += len(piece)
        if cursor >= 1 << 32:
            raise UsageError("expected weights of less than 4 GiB, found more: offsets have 32 bits", rule="ane.layout")
    lut = b"" if weight.lut is None else weight.lut.entries().astype("<f2").tobytes()
    pal = (
        b"" if weight.codebooks is None else weight.codebooks.astype(weight.codebooks.dtype.newbyteorder("<")).tobytes()
    )
    _check_budget(len(lut), len(pal), chip)
    plain = {
        "lut": lut,
        "pal": pal,
        "ocgs": b"".join(records),
        "scale": _floats(weight.scale) + (b"" if weight.zero is None else weight.zero.tobytes()),
        "bias": _floats(weight.bias),
        "weights": b"".join(pieces),
    }
    return _assemble(weight, header, plain)


def _check(weight: KernelWeight) -> None:
    channels, per_channel = weight.shape[0], prod(weight.shape[1:])
    vector = weight.vector
    rows = channels // vector if channels % vector == 0 else -1
    kinds = {16: ("float16",), 8: ("int8", "uint8")} if weight.codebooks is None else {}
    books = 1 if weight.codebooks is None else len(weight.codebooks)
    size = 0 if weight.unity else rows * per_channel
    integers = weight.values.dtype.name == "int8"
    scales = (channels, -(-per_channel // weight.block)) if weight.block else (channels,)
    for holds, what in (
        (
            0 not in weight.shape and max(weight.shape) < 1 << 32 and len(weight.shape) <= 8,
            "up to 8 dimensions, none of them 0",
        ),
        (weight.values.size == size, f"{size} values"),
        (weight.values.dtype.name in kinds.get(weight.bits, ("uint8",)), "float16, int8, E4M3, or indices uint8"),
        (weight.mask is None or weight.mask.shape == weight.values.shape, "a mask of the values' shape"),
        (weight.mask is None or vector == 1, "single entries under a mask"),
        (channels % books == 0 and (channels // books) % vector == 0, f"channels that {books} codebooks share evenly"),
        (
            weight.scale is None
            or (weight.scale.shape == scales and weight.scale.dtype.name in ("float16", "float32")),
            f"scales {list(scales)} of float16 or float32",
        ),
        (
            weight.bias is None or (weight.bias.shape == (channels,) and weight.bias.dtype.name == "float16"),
            "a bias per channel, float16",
        ),
        (
            weight.zero is None or (integers and weight.zero.shape == (channels,)),
            "zero points of int8, one per channel",
        ),
        (
            not weight.block or (integers and weight.scale is not None and weight.zero is None),
            "scales of blocks of int8",
        ),
        (not weight.unity or (channels == per_channel <= MOST_UNITY and weight.mask is None), "an identity"),
    ):
        if not holds:
            raise UsageError(f"expected {what}, found otherwise in a weight {list(weight.shape)}", rule="ane.layout")
    if weight.codebooks is not None and weight.codebooks.shape[1] != 1 << weight.bits:
        raise UsageError(f"expected {1 << weight.bits} entries, found {weight.codebooks.shape[1]}", rule="ane.layout")


def _check_budget(lut: int, pal: int, chip: Chip) -> None:
    activation, tables = chip.known("activation_lut_budget"), chip.known("palette_lut_budget")
    if activation is not None and lut > int(activation.value):
        raise UsageError(f"expected a table of {activation.value} bytes at most, found {lut}", rule="ane.budget")
    if tables is not None and lut + pal > int(tables.value):
        raise UsageError(
            f"expected palette and activation tables of {tables.value} bytes together, found {lut + pal}",
            rule="ane.budget",
        )


def channels_per_group(shape: tuple[int, ...], chip: Chip) -> int:
    """Return the output channels of a group, a power of two.

    Enough for the tiles to have one group each (TG: 1 of 3 channels, 32 of 512), but no more than the chip's cap, and
    no more than fit 64 KiB as fp16 (M6).
    """
    room = max(1, _KERNEL_BYTES // (2 * max(1, prod(shape[1:]))))
    shared = -(-shape[0] // int(chip.value("weight_tiles")))
    return min(int(chip.value("ocg_channels")), 1 << (room.bit_length() - 1), 1 << (shared - 1).bit_length())


def _geometry(weight: KernelWeight, chip: Chip) -> Header:
    """Return the header without sections: output channels per group as M6 measured them, at least one vector."""
    ocg = max(weight.vector, channels_per_group(weight.shape, chip))
    tiles = int(chip.value("weight_tiles"))
    return Header(
        kernel_format=weight.kernel_format,
        flags=sum(
            flag
            for flag, there in (
                (SPARSE, weight.mask is not None),
                (ASYMMETRIC, weight.zero is not None),
                (BLOCKS, weight.block > 0),
            )
            if there
        ),
        tiles=tiles,
        ocg=ocg // weight.vector * weight.vector,
        vector=weight.vector,
        codebooks=1 if weight.codebooks is None else len(weight.codebooks),
        copies=tiles if chip.value("copies_per_core") else 1,
        shape=weight.shape,
        target=chip.target,
        word=kernel_word(weight.kind, chip.target, chip.value("detect_zeros")),
        sections={},
        block=weight.block,
    )


def _piece(weight: KernelWeight, first: int, count: int) -> bytes:
    """Return the bytes of one group: values, or mask and kept values."""
    if weight.unity:
        return b""
    rows = slice(first // weight.vector, -(-(first + count) // weight.vector))
    values = weight.values.reshape(-1, prod(weight.shape[1:]))[rows]
    head = b""
    if weight.mask is not None:
        kept = weight.mask.reshape(-1, prod(weight.shape[1:]))[rows]
        head, values = np.packbits(kept.reshape(-1), bitorder="little").tobytes(), values[kept]
    if weight.codebooks is not None:
        return head + pack_lsb(values, weight.bits).tobytes()
    return head + values.astype(values.dtype.newbyteorder("<")).tobytes()


def _floats(values: Array | None) -> bytes:
    return b"" if values is None else values.astype(values.dtype.newbyteorder("<")).tobytes()


def _assemble(weight: KernelWeight, header: Header, plain: dict[str, bytes]) -> bytes:
    sections, cursor = {}, HEADER
    told = _described(weight, len(plain["ocgs"]) // RECORD)
    both = aligned(len(plain["lut"])) + aligned(len(plain["pal"]))
    for name in SECTIONS:
        count, typeno, bits = told[name] if plain[name] else (0, 0, 0)
        sections[name] = Section(cursor, len(plain[name]), count, typeno, bits)
        cursor += aligned(len(plain[name])) * (header.copies if name in ("scale", "bias") else 1)
        if name == "pal":
            cursor += both * (header.copies - 1)
    data = bytearray(cursor)
    data[:HEADER] = replace(header, sections=sections).to_bytes()
    for name, content in plain.items():
        at = sections[name].offset
        stride = both if name in ("lut", "pal") else aligned(len(content))
        for copy in range(header.copies if name not in ("ocgs", "weights") else 1):
            data[at + copy * stride : at + copy * stride + len(content)] = content
    seal(data)
    return bytes(data)


def _described(weight: KernelWeight, records: int) -> dict[str, tuple[int, int, int]]:
    """Return count, type number and bits per section, as the descriptor's field list names them (B25)."""
    channels, code = weight.shape[0], weight.kernel_format
    palette = weight.codebooks is not None
    half = formats.typeno(formats.FP16)
    single = weight.scale is not None and weight.scale.dtype.name == "float32"
    typeno = formats.index_typeno(weight.bits) if palette else formats.typeno(formats.primary_code(weight.entry))
    return {
        "lut": (1, half, 16),
        "pal": (0 if weight.codebooks is None else len(weight.codebooks), formats.palette_format(code), weight.bits)
        if palette
        else (0, 0, 0),
        "ocgs": (records, 0, 8 * RECORD),
        "scale": (channels, formats.typeno(formats.FP32), 32) if single else (channels, half, 16),
        "bias": (channels, half, 16),
        "weights": (channels, typeno, weight.bits),
    }
