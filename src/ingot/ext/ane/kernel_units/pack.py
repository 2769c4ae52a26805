"""Pack a weight into a kernel unit (``spec/ane-kernels.md``)."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from ingot.errors import UsageError
from ingot.ext.ane.chips import kernel_format as formats
from ingot.ext.ane.chips.activation import ActivationLut
from ingot.ext.ane.chips.chips import Chip
from ingot.ext.ane.chips.descriptor import KernelKind, kernel_word
from ingot.ext.ane.chips.kernel_format import pack_lsb
from ingot.ext.ane.kernel_units.header import (
    ASYMMETRIC,
    BLOCKS,
    HEADER,
    MAX_UNITY,
    RECORD,
    RECORD_WORDS,
    SECTIONS,
    SPARSE,
    UNRELOCATED,
    Header,
    Section,
    align,
    groups,
    seal,
)

Array = np.ndarray[Any, np.dtype[Any]]

_ENTRY_TYPES = {"float16": "half", "int8": "int8", "uint8": "uint8"}
_KERNEL_BYTES = 1 << 16  # limit per group on one Neural Engine (claim M6)


@dataclass(frozen=True, eq=False)
class KernelWeight:
    """A weight in the encoding in which it is packed.

    Parameters
    ----------
    shape : tuple of int
        Shape of the weight, output channels first.
    values : array
        Without codebooks, an array of ``shape``: float16, int8, or the bits of E4M3 as uint8. With codebooks, indices
        as uint8 [channels / vector, weights per channel]. Empty for an identity.
    bits : int
        Bits of a value, code or index.
    codebooks : array or None
        [codebooks, 2**bits, vector] of float16, int8 or uint8. The output channels are divided into equal runs, and run
        j uses codebook j.
    mask : array of bool or None
        Mask in the shape of ``values``: True for a value that is stored, False for a zero that is not stored.
    scale, bias : array or None
        float16 [channels], applied after the multiplication by the stored values w': ``y = scale * (w' x) + bias``. If
        ``block`` is not 0, scales are [channels, blocks], one for each run of ``block`` weights. Scales may be float32.
    lut : ActivationLut or None
        Table of the activation function.
    zero : array or None
        Zero points of integers, int8 [channels]: ``w = scale * (value - zero)``.
    block : int
        Number of consecutive weights of a channel that share a scale; 0 if all weights of a channel share it.
    unity : bool
        Whether the weight is the identity matrix times the scales.
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
        """Type of the multiplier's input: ``half``, ``int8``, ``uint8`` or ``e4m3``."""
        if self.codebooks is None:
            return {"float16": "half", "int8": "int8"}.get(self.values.dtype.name, "e4m3")
        return _ENTRY_TYPES[self.codebooks.dtype.name]

    @property
    def vector(self) -> int:
        return 1 if self.codebooks is None else int(self.codebooks.shape[2])

    @property
    def kernel_kind(self) -> KernelKind:
        """Description of the weight from which the kernel word is computed."""
        bits = None if self.codebooks is None else self.bits
        return KernelKind(self.entry, bits, self.mask is not None, self.zero is not None, self.vector)

    @property
    def kernel_format(self) -> int:
        """Code of the kernel format; a sparse weight has the code of its values."""
        if self.unity:
            return formats.unity_code(self.entry)
        if self.codebooks is None:
            return formats.primary_code(self.entry)
        return formats.palette_code(self.bits, self.entry)


def pack_unit(weight: KernelWeight, chip: Chip) -> bytes:
    """Return the content of a kernel unit's file.

    Raises
    ------
    UsageError
        ``ane.layout``: arrays that do not fit the shape, a codebook or vector that does not divide a group of channels,
        a weight of more than 4 GiB; ``ane.budget``: tables larger than the chip's limit, if the limit is known.
    UnsupportedError
        ``ane.refused``: a format without a code in the chip's register.
    """
    _check(weight)
    header = _geometry(weight, chip)
    chunks = []
    records = []
    cursor = 0
    tile = 0
    for of_tile, first, count in groups(header):
        if of_tile != tile:
            chunks.append(bytes(align(cursor) - cursor))
            cursor = align(cursor)
            tile = of_tile
        group = _group_bytes(weight, first, count)
        records.append(struct.pack(f"<{RECORD_WORDS}I", cursor, count, *[UNRELOCATED] * 10, 0, 0))
        chunks.append(group)
        cursor += len(group)
        if cursor >= 1 << 32:
            raise UsageError(
                "expected weights of less than 4 GiB, because offsets have 32 bits; found more", rule="ane.layout"
            )
    lut = b"" if weight.lut is None else weight.lut.entries().astype("<f2").tobytes()
    pal = (
        b"" if weight.codebooks is None else weight.codebooks.astype(weight.codebooks.dtype.newbyteorder("<")).tobytes()
    )
    _check_budget(len(lut), len(pal), chip)
    contents = {
        "lut": lut,
        "pal": pal,
        "ocgs": b"".join(records),
        "scale": _floats(weight.scale) + (b"" if weight.zero is None else weight.zero.tobytes()),
        "bias": _floats(weight.bias),
        "weights": b"".join(chunks),
    }
    return _assemble(weight, header, contents)


def _check(weight: KernelWeight) -> None:
    channels = weight.shape[0]
    per_channel = prod(weight.shape[1:])
    vector = weight.vector
    rows = channels // vector if channels % vector == 0 else -1
    dtypes = {16: ("float16",), 8: ("int8", "uint8")} if weight.codebooks is None else {}
    books = 1 if weight.codebooks is None else len(weight.codebooks)
    size = 0 if weight.unity else rows * per_channel
    integers = weight.values.dtype.name == "int8"
    scales = (channels, -(-per_channel // weight.block)) if weight.block else (channels,)
    for is_valid, expected in (
        (
            0 not in weight.shape and max(weight.shape) < 1 << 32 and len(weight.shape) <= 8,
            "up to 8 dimensions, all larger than 0",
        ),
        (weight.values.size == size, f"{size} values"),
        (
            weight.values.dtype.name in dtypes.get(weight.bits, ("uint8",)),
            "values of float16, int8, E4M3, or indices of uint8",
        ),
        (weight.mask is None or weight.mask.shape == weight.values.shape, "a mask in the shape of the values"),
        (weight.mask is None or vector == 1, "no vectors under a mask"),
        (
            channels % books == 0 and (channels // books) % vector == 0,
            f"the same number of channels, a multiple of the vector size, for each of {books} codebooks",
        ),
        (
            weight.scale is None
            or (weight.scale.shape == scales and weight.scale.dtype.name in ("float16", "float32")),
            f"scales {list(scales)} of float16 or float32",
        ),
        (
            weight.bias is None or (weight.bias.shape == (channels,) and weight.bias.dtype.name == "float16"),
            "a float16 bias per channel",
        ),
        (
            weight.zero is None or (integers and weight.zero.shape == (channels,)),
            "an int8 zero point per channel, and int8 values",
        ),
        (
            not weight.block or (integers and weight.scale is not None and weight.zero is None),
            "scales per block only for int8 values, without zero points",
        ),
        (
            not weight.unity or (channels == per_channel <= MAX_UNITY and weight.mask is None),
            f"an identity without a mask, of at most {MAX_UNITY} channels",
        ),
    ):
        if not is_valid:
            raise UsageError(f"expected {expected} for a weight of shape {list(weight.shape)}", rule="ane.layout")
    if weight.codebooks is not None and weight.codebooks.shape[1] != 1 << weight.bits:
        raise UsageError(
            f"expected {1 << weight.bits} codebook entries, found {weight.codebooks.shape[1]}", rule="ane.layout"
        )


def _check_budget(lut: int, pal: int, chip: Chip) -> None:
    activation = chip.published("activation_lut_budget")
    tables = chip.published("palette_lut_budget")
    if activation is not None and lut > int(activation.value):
        raise UsageError(
            f"expected an activation table of at most {activation.value} bytes, found {lut}", rule="ane.budget"
        )
    if tables is not None and lut + pal > int(tables.value):
        raise UsageError(
            f"expected palette and activation tables of at most {tables.value} bytes together, found {lut + pal}",
            rule="ane.budget",
        )


def channels_per_group(shape: tuple[int, ...], chip: Chip) -> int:
    """Return the number of output channels of a group, a power of two.

    It is large enough that each tile has at most one group: 1 for 3 channels and 32 for 512 channels in source TG of
    ``spec/ane-chips.md``. It is limited by the chip's maximum, and by the number of channels whose fp16 weights fit in
    64 KiB (claim M6).
    """
    fitting = max(1, _KERNEL_BYTES // (2 * max(1, prod(shape[1:]))))
    per_tile = -(-shape[0] // int(chip.value("weight_tiles")))
    return min(int(chip.value("ocg_channels")), 1 << (fitting.bit_length() - 1), 1 << (per_tile - 1).bit_length())


def _geometry(weight: KernelWeight, chip: Chip) -> Header:
    """Return the header of the unit for ``weight``, with no sections yet.

    The number of channels of a group is that of ``channels_per_group``. If it is smaller than the vector size, it is
    raised to the vector size. Otherwise it is rounded down to a multiple of the vector size.
    """
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
        word=kernel_word(weight.kernel_kind, chip.target, chip.value("detect_zeros")),
        sections={},
        block=weight.block,
    )


def _group_bytes(weight: KernelWeight, first: int, count: int) -> bytes:
    """Return the encoding of one group: its values; if the weight is sparse, the mask and then the values."""
    if weight.unity:
        return b""
    rows = slice(first // weight.vector, -(-(first + count) // weight.vector))
    values = weight.values.reshape(-1, prod(weight.shape[1:]))[rows]
    head = b""
    if weight.mask is not None:
        selected = weight.mask.reshape(-1, prod(weight.shape[1:]))[rows]
        head = np.packbits(selected.reshape(-1), bitorder="little").tobytes()
        values = values[selected]
    if weight.codebooks is not None:
        return head + pack_lsb(values, weight.bits).tobytes()
    return head + values.astype(values.dtype.newbyteorder("<")).tobytes()


def _floats(values: Array | None) -> bytes:
    return b"" if values is None else values.astype(values.dtype.newbyteorder("<")).tobytes()


def _assemble(weight: KernelWeight, header: Header, contents: dict[str, bytes]) -> bytes:
    sections = {}
    cursor = HEADER
    fields = _section_fields(weight, len(contents["ocgs"]) // RECORD)
    table_bytes = align(len(contents["lut"])) + align(len(contents["pal"]))
    for name in SECTIONS:
        count, typeno, bits = fields[name] if contents[name] else (0, 0, 0)
        sections[name] = Section(cursor, len(contents[name]), count, typeno, bits)
        cursor += align(len(contents[name])) * (header.copies if name in ("scale", "bias") else 1)
        if name == "pal":
            cursor += table_bytes * (header.copies - 1)
    data = bytearray(cursor)
    data[:HEADER] = replace(header, sections=sections).to_bytes()
    for name, content in contents.items():
        offset = sections[name].offset
        stride = table_bytes if name in ("lut", "pal") else align(len(content))
        for copy in range(header.copies if name not in ("ocgs", "weights") else 1):
            data[offset + copy * stride : offset + copy * stride + len(content)] = content
    seal(data)
    return bytes(data)


def _section_fields(weight: KernelWeight, records: int) -> dict[str, tuple[int, int, int]]:
    """Return for each section its count, type number and bits, as a task descriptor has them (claim B25)."""
    channels = weight.shape[0]
    code = weight.kernel_format
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
