"""Parser of the header of a GGUF file: checked metadata and a checked table of tensors.

Layout (``docs/gguf.md`` of ggml): ``GGUF``, u32 version, u64 number of tensors, u64 number of metadata pairs; pairs of
key, type and value; for each tensor its name, u32 number of dimensions, u64 sizes with the fastest-varying dimension
first, u32 type, and u64 offset from the start of the data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.core.numeric.dtypes import DTYPES, element_count
from ingot.core.parsing.columns import Array, Rows
from ingot.errors import CodecError, FormatError, UnsupportedError
from ingot.formats.detect import TRUNCATED_HINT
from ingot.formats.gguf.cursor import Cursor, Records
from ingot.formats.gguf.metadata import ALIGNMENT, DEFAULT_ALIGNMENT, NUMPY, STRUCT, is_text, with_values
from ingot.formats.gguf.types import BLOCKED, DENSE, FILE_TYPES, VALUES
from ingot.model.bytesource import ByteSource
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.layouts.ggml import TYPES, GgmlBlocksLayout
from ingot.model.spec import PartSpec, TensorSpec

MAX_RANK = 4
MAX_NAME = 63
NUMBERS: Mapping[str, int] = {name: number for table in (DENSE, BLOCKED) for number, name in table.items()}
_QUANTIZATION = "general.quantization_version"
_FILE_TYPE = "general.file_type"
_QUANTIZATION_VERSION = 2  # GGML_QNT_VERSION


def type_of(spec: TensorSpec) -> str:
    """Return the element type or the block type of a supported tensor."""
    return GgmlBlocksLayout.from_tensor(spec).type if spec.codec == GgmlBlocksLayout.codec else spec.dtype


def why_unsupported(spec: TensorSpec) -> str | None:
    """Return why a GGUF file cannot store this tensor, by the rules of llama.cpp's reader; None if a file can."""
    size = len(spec.name.encode(errors="replace"))
    if size > MAX_NAME or "\0" in spec.name or not is_text(spec.name):
        return (
            f"expected a name in UTF-8 of at most {MAX_NAME} bytes without NUL, found {size} bytes; rename the tensor "
            "first"
        )
    if len(spec.shape) > MAX_RANK:
        return f"GGUF has at most {MAX_RANK} dimensions, found {len(spec.shape)}"
    if spec.codec == DenseLayout.codec:
        return _why_unsupported_dense(spec)
    if spec.codec != GgmlBlocksLayout.codec:
        return f"GGUF stores dense tensors and ggml's blocks, this tensor is {spec.codec}"
    try:
        layout = GgmlBlocksLayout.from_tensor(spec)
    except CodecError as error:
        return error.message
    return _why_unsupported_parts(spec, layout.part_specs(spec.shape))


def _why_unsupported_dense(spec: TensorSpec) -> str | None:
    if spec.dtype not in NUMBERS or spec.dtype not in DTYPES:
        return f"GGUF has no element type {spec.dtype[:80]}; it has {', '.join(DENSE.values())}"
    return _why_unsupported_parts(spec, (PartSpec(DATA, spec.dtype, DTYPES[spec.dtype].nbytes(spec.size)),))


def _why_unsupported_parts(spec: TensorSpec, expected: Sequence[PartSpec]) -> str | None:
    actual = [(part.role, part.dtype, part.type or part.dtype, part.encoding, part.length) for part in spec.parts]
    if actual != [(part.role, part.dtype, part.dtype, "raw", part.length) for part in expected]:
        part = expected[0]
        return (
            f"GGUF stores one uncompressed part {part.role!r} of {part.length} bytes of {part.dtype}, found other parts"
        )
    return None


def describe_types(
    metadata: Mapping[str, Any], specs: Sequence[TensorSpec], requested: int | None = None
) -> dict[str, Any]:
    """Return ``metadata`` with the keys that describe the types of the tensors ``specs``.

    ``metadata`` is a result of ``to_gguf_metadata``. If a tensor has blocks, a missing ``general.quantization_version``
    is added. If ``requested`` is set, it becomes ``general.file_type``. Otherwise an existing ``general.file_type``
    stays if a tensor has the type that it implies, because it may name a mixture such as ``Q4_K_M``. In all other cases
    it becomes the type that takes the most bytes.
    """
    sizes: Counter[str] = Counter()
    for spec in specs:
        sizes[type_of(spec)] += spec.nbytes or 0
    added: dict[str, tuple[str, Any]] = {}
    if _QUANTIZATION not in metadata and not sizes.keys().isdisjoint(BLOCKED.values()):
        added[_QUANTIZATION] = ("u32", _QUANTIZATION_VERSION)
    file_type = metadata.get(_FILE_TYPE)
    is_valid = isinstance(file_type, int) and FILE_TYPES.get(file_type) in (None, *sizes)
    main = next((type_name for type_name, _ in sizes.most_common() if type_name in FILE_TYPES.values()), None)
    if requested is not None:
        added[_FILE_TYPE] = ("u32", requested)
    elif main is not None and (file_type is None or not is_valid):
        added[_FILE_TYPE] = ("u32", next(number for number, type_name in FILE_TYPES.items() if type_name == main))
    return with_values(metadata, added) if added else dict(metadata)


_MAX_EXACT = 1 << 55
_TYPES = {**DENSE, **BLOCKED}
# Elements and bytes of a block, by type number; a dense element counts as a block of one element.
_BLOCKS = np.zeros((max(_TYPES) + 1, 2), np.int64)
for _number, _name in DENSE.items():
    _BLOCKS[_number] = 1, DTYPES[_name].bits // 8
for _number, _name in BLOCKED.items():
    _BLOCKS[_number] = TYPES[_name].elements, TYPES[_name].nbytes


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor's entry in the header.

    ``type`` is a dense element type or a block type; ``offset`` counts bytes from the start of the data.
    """

    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Infos:
    """Checked tensor infos, the alignment of the tensors, and the start and end of their data.

    ``sizes`` has a row of ``MAX_RANK`` sizes per tensor, the fastest-varying dimension first. Only the first
    ``ranks[i]`` sizes of row i are valid.
    """

    rows: dict[str, int]
    ranks: Array
    sizes: Array
    types: Array
    offsets: Array
    nbytes: Array
    alignment: int
    start: int
    end: int

    def entries(self) -> Rows[Entry]:
        """Return the entries, which are built on access."""

        def build(row: int) -> Entry:
            shape = tuple(self.sizes[row, : self.ranks[row]][::-1].tolist())
            return Entry(shape, _TYPES[int(self.types[row])], int(self.offsets[row]), int(self.nbytes[row]))

        return Rows(self.rows, build)


def read_infos(cursor: Cursor, count: int, alignments: Sequence[int]) -> Infos | None:
    """Read the infos of ``count`` tensors; the alignment is the first of ``alignments`` that agrees with their offsets.

    Return None if a rule may be broken. The cursor then does not move, and the caller runs slower checks, which name
    the rule.
    """
    before = cursor.position
    records = cursor.records(count, MAX_RANK)
    infos = None if records is None else _check(records, cursor, alignments)
    if infos is None:
        cursor.position = before
    return infos


def _check(records: Records, cursor: Cursor, alignments: Sequence[int]) -> Infos | None:
    ranks = np.array(records.ranks, np.int64)
    sizes, types, offsets = _fields(np.array(records.starts, np.int64), ranks, cursor)
    rows = _rows(records.names)
    nbytes = _nbytes(ranks, sizes, types)
    if rows is None or nbytes is None or (offsets > _MAX_EXACT).any():
        return None
    for alignment in alignments:
        start = -(-cursor.position // alignment) * alignment
        end = _end(nbytes, offsets.astype(np.int64), alignment, cursor.size - start)
        if end is not None:
            return Infos(rows, ranks, sizes, types, offsets, nbytes, alignment, start, start + end)
    return None


def _fields(starts: Array, ranks: Array, cursor: Cursor) -> tuple[Any, Any, Any]:
    """Return sizes [tensors, MAX_RANK], types and offsets from the infos whose fixed fields begin at ``starts``.

    Unused sizes are 1.
    """
    sizes = np.ones((starts.size, MAX_RANK), np.uint64)
    types = np.empty(starts.size, np.int64)
    offsets = np.empty(starts.size, np.uint64)
    data = np.frombuffer(cursor.consumed(), np.uint8)
    for rank in np.unique(ranks).tolist():
        order = cursor.order
        dtype = np.dtype([("sizes", f"{order}u8", (rank,)), ("type", f"{order}u4"), ("offset", f"{order}u8")])
        rows = np.flatnonzero(ranks == rank)
        fields = data[starts[rows, None] + np.arange(dtype.itemsize)].view(dtype)[:, 0]
        sizes[rows, :rank] = fields["sizes"]
        types[rows], offsets[rows] = fields["type"], fields["offset"]
    return sizes, types, offsets


def _rows(names: Sequence[str]) -> dict[str, int] | None:
    """Return the index of each tensor by its name; None if a name is repeated, contains NUL, or is not ASCII."""
    rows = dict(zip(names, range(len(names)), strict=True))
    joined = "".join(names)
    return rows if len(rows) == len(names) and joined.isascii() and "\0" not in joined else None


def _nbytes(ranks: Array, sizes: Any, types: Array) -> Array | None:
    """Return the number of bytes of each tensor; None if a rule is broken or the product may overflow."""
    if (
        (types >= len(_BLOCKS)).any()
        or (sizes > _MAX_EXACT).any()
        or (sizes.prod(1, dtype=np.float64) > _MAX_EXACT).any()
    ):
        return None
    elements, size = _BLOCKS[types].T
    counts = sizes.prod(1).astype(np.int64)
    fastest = sizes[:, 0].astype(np.int64)
    if not elements.all() or (fastest % np.maximum(elements, 1)).any():
        return None
    nbytes: Array = counts // elements * size
    return nbytes


def _end(nbytes: Array, offsets: Array, alignment: int, room: int) -> int | None:
    """Return the end of the last tensor, in bytes from the start of the data.

    Return None if the tensors are not stored one after the other, each padded to the alignment, or exceed ``room``
    bytes.
    """
    if not nbytes.size:
        return 0
    if nbytes.sum(dtype=np.float64) > room:  # so that the sums below fit in 63 bits
        return None
    ends = np.cumsum(-(-nbytes // alignment) * alignment)
    end = int(offsets[-1] + nbytes[-1])
    return end if offsets[0] == 0 and (offsets[1:] == ends[:-1]).all() and end <= room else None


MAGIC = b"GGUF"
VERSIONS = (2, 3)
# minimum sizes in bytes
_MIN_PAIR_BYTES = 14
_MIN_TENSOR_BYTES = 24


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header.

    ``types`` are the types of the metadata by key, ``array:T`` for arrays. The data begin at offset ``start`` of the
    file, and the last tensor ends at ``end``. ``raw`` contains the bytes of the header. ``alignment_applies`` is false
    if the offsets of tensors contradict the declared alignment. ``raw_strings`` contains the strings that are not
    UTF-8, as bytes, by key and by index in the key's array (0 for a single string).
    """

    version: int
    big_endian: bool
    metadata: Mapping[str, Any]
    types: Mapping[str, str]
    entries: Mapping[str, Entry]
    start: int
    end: int
    raw: bytes
    alignment_applies: bool
    raw_strings: Mapping[str, Mapping[int, bytes]]


def parse(source: ByteSource, name: str) -> Header:
    """Read and check the header of a file.

    Raises
    ------
    FormatError
        With the rules of ``spec/gguf.md``.
    UnsupportedError
        ``gguf.version``, ``gguf.type``: an older version, or a tensor type that current llama.cpp does not read.
    """
    cursor = Cursor(source, name)
    version = _version(cursor)
    tensors = cursor.count(_MIN_TENSOR_BYTES, "gguf.count", "tensors")
    pairs = cursor.count(_MIN_PAIR_BYTES, "gguf.count", "metadata pairs")
    metadata: dict[str, Any] = {}
    types: dict[str, str] = {}
    raw_strings: dict[str, dict[int, bytes]] = {}
    for _ in range(pairs):
        key = cursor.string()
        if not key or key in metadata or "\0" in key:
            problem = "it again" if key in metadata else "an empty key or a key with NUL"
            raise FormatError("gguf.key", f"expected each key once, found {problem}", where=f"{name}: {key[:80]!r}")
        types[key], metadata[key], raw = _value(cursor, f"{name}: {key[:80]}")
        if raw:
            raw_strings[key] = raw
    alignment = _alignment(metadata, types, name)
    infos = read_infos(cursor, tensors, (alignment, DEFAULT_ALIGNMENT))
    if infos is not None:
        entries: Mapping[str, Entry] = infos.entries()
        start = infos.start
        end = infos.end
        alignment_applies = infos.alignment == alignment
    else:
        entries = _entries(cursor, tensors, name)
        start, end, alignment_applies = _data_range(entries, alignment, cursor, name)
    return Header(
        version,
        cursor.order == ">",
        metadata,
        types,
        entries,
        start,
        end,
        cursor.consumed(),
        alignment_applies,
        raw_strings,
    )


def _entries(cursor: Cursor, count: int, name: str) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for _ in range(count):
        tensor, entry = _entry(cursor, name)
        if tensor in entries:
            raise FormatError("gguf.name", "expected each tensor once, found it twice", where=f"{name}: {tensor}")
        entries[tensor] = entry
    return entries


def _version(cursor: Cursor) -> int:
    if cursor.size < 4 or bytes(cursor.take(4)) != MAGIC:
        raise FormatError("gguf.magic", "expected a file that begins with GGUF", where=cursor.name)
    version = int(cursor.number("I"))
    if version & 0xFFFF == 0 and version:
        cursor.big_endian()
        version = int.from_bytes(version.to_bytes(4, "little"), "big")
    if version not in VERSIONS:
        raise UnsupportedError(
            f"expected version {' or '.join(map(str, VERSIONS))}, found {version}; convert the model "
            "again with llama.cpp",
            rule="gguf.version",
            where=cursor.name,
        )
    return version


def _type(cursor: Cursor, location: str) -> str:
    type_id = cursor.number("I")
    if type_id not in VALUES:
        raise FormatError("gguf.value-type", f"expected a type from 0 to 12, found {type_id}", where=location)
    return VALUES[type_id]


def _value(cursor: Cursor, location: str) -> tuple[str, Any, dict[int, bytes]]:
    """Return the type of the next value, the value, and by index the bytes of its strings that are not UTF-8.

    The value is text, a number, a bool, or a list of these.
    """
    type_name = _type(cursor, location)
    if type_name == "string":
        texts, raw = _strings(cursor, 1, location)
        return type_name, texts[0], raw
    if type_name != "array":
        return (
            type_name,
            _bool(cursor.number("B"), location) if type_name == "bool" else cursor.number(STRUCT[type_name]),
            {},
        )
    type_name = _type(cursor, location)
    if type_name == "array":
        raise FormatError("gguf.value-type", "expected an array of numbers or strings, found arrays", where=location)
    dtype = NUMPY.get(type_name, "")
    count = cursor.elements(int(dtype[1:]) if dtype else 8, type_name, location)
    if type_name == "string":
        utf8 = cursor.strings(count)
        return "array:string", *(_strings(cursor, count, location) if utf8 is None else (utf8, {}))
    values = cursor.numbers(dtype, count)
    return f"array:{type_name}", [_bool(value, location) for value in values] if type_name == "bool" else values, {}


def _strings(cursor: Cursor, count: int, location: str) -> tuple[list[str], dict[int, bytes]]:
    """Return the next strings, and by index the bytes of strings that are not UTF-8."""
    texts: list[str] = []
    raw: dict[int, bytes] = {}
    for index in range(count):
        text, data = cursor.text(location)
        texts.append(text)
        if data is not None:
            raw[index] = data
    return texts, raw


def _bool(value: int, location: str) -> bool:
    if value > 1:
        raise FormatError("gguf.bool", f"expected 0 or 1, found {value}", where=location)
    return bool(value)


def _alignment(metadata: Mapping[str, Any], types: Mapping[str, str], name: str) -> int:
    value = metadata.get(ALIGNMENT, DEFAULT_ALIGNMENT)
    if types.get(ALIGNMENT, "u32") != "u32" or value < 1 or value & (value - 1):
        raise FormatError(
            "gguf.alignment",
            f"expected {ALIGNMENT} to be a power of two in u32, found {str(value)[:40]} in {types[ALIGNMENT]}",
            where=name,
        )
    return int(value)


def _entry(cursor: Cursor, name: str) -> tuple[str, Entry]:
    tensor = cursor.string()
    location = f"{name}: {tensor[:80]}"
    if "\0" in tensor:
        raise FormatError("gguf.name", f"expected a name without NUL, found {tensor[:80]!r}", where=name)
    rank = cursor.number("I")
    if rank > MAX_RANK:
        raise FormatError("gguf.rank", f"expected at most {MAX_RANK} dimensions, found {rank}", where=location)
    *sizes, number, offset = cursor.fields(f"{rank}QIQ")
    shape = tuple(reversed(sizes))
    count = element_count(shape, "gguf.shape", location)
    if number in DENSE:
        return tensor, Entry(shape, DENSE[number], offset, DTYPES[DENSE[number]].nbytes(count))
    if number not in BLOCKED:
        raise UnsupportedError(
            f"expected a tensor type that llama.cpp reads, found type number {number}", rule="gguf.type", where=location
        )
    block = TYPES[BLOCKED[number]]
    columns = shape[-1] if shape else 1
    if columns % block.elements:
        raise FormatError(
            "gguf.columns",
            f"expected a multiple of {block.elements} columns for {BLOCKED[number]}, found {columns}",
            where=location,
        )
    return tensor, Entry(shape, BLOCKED[number], offset, count // block.elements * block.nbytes)


def _data_range(entries: Mapping[str, Entry], alignment: int, cursor: Cursor, name: str) -> tuple[int, int, bool]:
    """Return the start and end of the data in the file, and whether the declared alignment is correct.

    ``llama-quantize`` copies the key ``general.alignment`` but always pads to 32 bytes. If the offsets contradict the
    declared alignment, 32 is tried.
    """
    try:
        return (*_check_offsets(entries, alignment, cursor.position, cursor.size, name), True)
    except FormatError:
        if alignment == DEFAULT_ALIGNMENT:
            raise
        try:
            return (*_check_offsets(entries, DEFAULT_ALIGNMENT, cursor.position, cursor.size, name), False)
        except FormatError:
            pass
        raise


def _check_offsets(entries: Mapping[str, Entry], alignment: int, header: int, size: int, name: str) -> tuple[int, int]:
    """Return the start and end of the data in the file.

    Raises an error unless the tensors, each padded to the alignment, follow each other and end within the file.
    """
    start = -(-header // alignment) * alignment
    expected = 0
    end = 0
    for tensor, entry in entries.items():
        if entry.offset != expected:
            raise FormatError(
                "gguf.offset",
                f"expected the tensor at offset {expected}, right after the previous tensor, found {entry.offset}",
                where=f"{name}: {tensor}",
            )
        end = expected + entry.nbytes
        expected = -(-end // alignment) * alignment
    if entries and start + end > size:
        raise FormatError(
            "gguf.data",
            f"expected {start + end} bytes for all tensors, found a file of {size}; {TRUNCATED_HINT}",
            where=name,
        )
    return start, start + end
