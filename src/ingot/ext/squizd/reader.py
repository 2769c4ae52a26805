"""Read the header, layer index, scale tables, directory and appendices of a ``.squizd`` file, but no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from ingot.core.bytes import checksums
from ingot.core.parsing.columns import Array
from ingot.core.parsing.manifest_digest import KEY
from ingot.errors import FormatError, IntegrityError
from ingot.ext.squizd.blocks import FLAG_OF, INT4
from ingot.ext.squizd.channels import filled_blocks
from ingot.ext.squizd.directory import Directory
from ingot.ext.squizd.directory import check as check_directory
from ingot.ext.squizd.header import Notes, read_header, read_index
from ingot.ext.squizd.layout import (
    ARCHITECTURE,
    COREML_HEADER,
    COREML_MAGIC,
    DIRECTORY_HEADER,
    DIRECTORY_MAGIC,
    DRAFT_HEADER,
    DRAFT_MAGIC,
    HEADER,
    INDEX_ENTRY,
    SCALES_MAGIC,
    TABLE_HEADER,
    Header,
    LayerIndex,
)
from ingot.ext.squizd.masks import Key, layer_masks, reading_of
from ingot.ext.squizd.scales import Array as Channels
from ingot.ext.squizd.scales import tables
from ingot.ext.squizd.scan import SCALED, ScannedBlock, end_of, matrices_of, name_blocks, scan_blocks, with_mask
from ingot.ext.squizd.section_reader import (
    locate,
    masks_by_layer,
    non_dense,
    note_gaps,
    read_directory,
    skip_zeros,
)
from ingot.ext.squizd.tensors import Located, tensors_of
from ingot.formats.base import Catalog
from ingot.model.artifact import Attachments
from ingot.model.bytesource import ByteSource
from ingot.model.draft_head_names import names_by_shape
from ingot.model.part import Part
from ingot.model.reading.ranges import HeaderSource, read_bytes
from ingot.model.stacks import DEFINED_BITS, Flags
from ingot.reporting.report import Column, Table

_FEATURES = (Column("flag", head="flag"), Column("set", "flag", "set"))
_SPARSE = (
    Column("", "count", "channels a block"),
    Column("", "count", "layers with masks"),
    Column("", "ratio", "mean"),
)
_DRAFT = (Column("", "count", "layers"), Column("", "count", "tensors"), Column("", "count", "vocabulary"))
_COREML = (Column("", "bytes", "zipped"),)


def details(header: Header, attachments: Attachments) -> Sequence[Table]:
    """Return a table of feature flags, and a table for each feature with figures."""
    flags = header.flags
    tables = [Table("", _FEATURES, [(flag.name or "", bool(flags & flag)) for flag in Flags], "features")]
    if flags & Flags.SPARSE:
        meta = header.sparsity
        tables.append(Table("", _SPARSE, [(meta.block, meta.layers, meta.mean)], "sparsity"))
    if flags & Flags.EAGLE:
        row = (header.draft.layers, len(attachments.draft or ()), header.draft.vocab)
        tables.append(Table("", _DRAFT, [row], "draft head"))
    if flags & Flags.ANE_COREML and attachments.coreml is not None:
        tables.append(Table("", _COREML, [(attachments.coreml.length,)], "Core ML package"))
    return tables


_CHUNK = 4 << 20
_BETWEEN = "squizd.between"
_NOTHING = np.empty((0, 2), np.int64)


@dataclass(slots=True)
class _State:
    """The state of reading a file.

    Headers are read from ``source``, which reads ahead; weights are read from ``file``. ``layers`` has the begin and
    end of each layer as rows.
    """

    source: HeaderSource
    file: ByteSource
    header: Header
    index: LayerIndex
    notes: Notes
    verify: bool
    remarks: Notes = field(default_factory=list)
    limit: int = 0  # required end of the last appendix
    scaled: int = 0  # quantized matrices of a model without names
    layers: Array = field(init=False)

    def __post_init__(self) -> None:
        self.layers = self.index.spans()

    @property
    def location(self) -> str:
        return self.source.name

    def has(self, flag: Flags) -> bool:
        return bool(self.header.flags & flag)

    def refuse(self, rule: str, message: str) -> FormatError:
        return FormatError(rule, message, where=self.location)


def read_catalog(source: ByteSource, name: str = "", *, verify: bool = True) -> Catalog:
    """Return the catalog of a file after checks of everything except its weights.

    Parameters
    ----------
    source : ByteSource
        The open file. The catalog closes it later, unless an error is raised.
    name : str
        Name of the file in its store; by default the name of the source.
    verify : bool
        Whether parts check their digests when they are read completely.

    Raises
    ------
    FormatError, IntegrityError, UnsupportedError
        A rule of ``spec/squizd.md``.
    """
    state = _open(source, verify)
    file = state.file
    source = state.source
    header = state.header
    begin = HEADER + INDEX_ENTRY * header.layer_count
    start = max(begin, int(state.layers[:, 1].max()))
    filled = state.layers[state.layers[:, 1] > state.layers[:, 0]]
    note_gaps(source, filled, [(begin, start)], state.remarks, _BETWEEN)
    table_ranges, tables_end = _tables(state, start)
    directory_offset = _directory_offset(state, tables_end)
    directory, raw, end = read_directory(source, directory_offset, source.size, state.location, begin)
    if directory is None:
        _require_no_other_directory(state, start, directory_offset)
        located: Mapping[str, Located]
        located = _without_directory(state, table_ranges, tables_end)
        starts = _masks(state)
    else:
        if verify:
            check_directory(directory, memoryview(raw)[begin:], memoryview(raw)[:begin], state.location)
        located = locate(source, directory, state.layers, table_ranges, state.notes, state.location)
        starts = masks_by_layer(located, directory)
    _check_flags(state, located)
    possible_offsets = (
        (start, tables_end) if directory is None else (start, tables_end, directory_offset + DIRECTORY_HEADER)
    )  # possible offsets of tables
    _check_index_scales(state, [offset - TABLE_HEADER for offset, _ in table_ranges] or possible_offsets, starts)
    is_old_order = directory_offset == tables_end  # older files have the directory before the appendices
    state.limit = source.size if is_old_order else directory_offset
    attachments, tail = _appendices(state, directory, end if is_old_order else tables_end, table_ranges)
    _check_end(state, tail if is_old_order else max(tail, end))
    return Catalog(
        tensors=tensors_of(file, located, verify=verify),
        metadata={
            **(directory.metadata if directory is not None else {}),
            **({ARCHITECTURE: header.arch} if header.arch else {}),
        },
        headers={name or source.name: raw},
        sources=(file,),
        notes=tuple(state.notes),
        remarks=tuple(state.remarks),
        attachments=attachments,
        details=partial(details, header, attachments),
        features=Flags(header.flags & DEFINED_BITS),
        manifest_digest=directory is not None and directory.ingot_digest is not None,
    )


def _open(file: ByteSource, verify: bool) -> _State:
    """Read the header and the layer index of ``file``; return the state of the reader."""
    source = HeaderSource(file)
    header, notes = read_header(source)
    index, index_notes = read_index(source, header)
    return _State(source, file, header, index, notes + index_notes, verify)


def _tables(state: _State, start: int) -> tuple[list[tuple[int, int]], int]:
    """Return the scale tables after the last weight block, and their end; up to 63 zero bytes may precede them."""
    next_offset = skip_zeros(state.source, start, state.source.size)
    if read_bytes(state.source, next_offset, min(4, state.source.size - next_offset)) in (
        SCALES_MAGIC,
        DIRECTORY_MAGIC,
    ):
        start = next_offset
    return tables(state.source, start, state.location)


def _without_directory(state: _State, table_ranges: Sequence[tuple[int, int]], tail: int) -> dict[str, Located]:
    state.remarks.append(("squizd.no-directory", "no directory: names, element types and digests are not stored"))
    starts = _masks(state)
    spans = [(start, starts.get(layer, end)) for layer, (start, end) in enumerate(state.layers.tolist())]
    blocks = scan_blocks(state.source, spans, state.location)
    state.scaled = sum(scanned.block.magic in SCALED for scanned in blocks)
    other_entries = (0, _draft_entries(state, tail))
    located = name_blocks(state.source, blocks, table_ranges, state.location, other_entries=other_entries)
    return _with_masks(state, blocks, located, starts) if starts else located


def _with_masks(
    state: _State, blocks: Sequence[ScannedBlock], located: dict[str, Located], starts: Mapping[int, int]
) -> dict[str, Located]:
    """Return the tensors of a file without a directory, with masks if their interpretation is unambiguous."""
    matrices = matrices_of(blocks)
    names = {(scanned.layer, scanned.number): name for scanned, name in zip(blocks, located, strict=True)}
    layers = [
        layer_masks(layer, matrices[layer], offset, _mask_bytes(state, layer, offset))
        for layer, offset in starts.items()
    ]

    def filled(key: Key, axis: int, block: int, selected: Channels) -> Channels | None:
        return filled_blocks(state.file, located[names[key]], axis, block, selected)

    reading = reading_of(layers, state.header.sparsity, state.location, filled)
    if reading is None:
        state.remarks.append(
            ("squizd.masks-apart", "the matrices and bits of the masks are ambiguous: weights are read as stored")
        )
        return located
    if not reading.usual:
        state.remarks.append(("squizd.mask-order", reading.describe()))
    masked = {names[key]: with_mask(located[names[key]], mask) for key, mask in reading.masks.items()}
    return {**located, **masked}


def _mask_bytes(state: _State, layer: int, offset: int) -> bytes:
    """Return the bytes of a layer's masks, which are the bytes from ``offset`` to the end of the layer."""
    size = int(state.layers[layer, 1]) - offset
    if size > _CHUNK:
        raise state.refuse("squizd.sparse-masks", f"expected masks of at most {_CHUNK} bytes a layer, found {size}")
    return read_bytes(state.source, offset, size)


def _masks(state: _State) -> dict[int, int]:
    """Return the offset of the masks by layer, for layers with masks: their ``scale_offset`` is inside the layer."""
    inside = state.index.inside().tolist() if state.has(Flags.SPARSE) else ()
    return {layer: state.index[layer].scales for layer in inside}


def _check_flags(state: _State, located: Mapping[str, Located]) -> None:
    """Check that the header has the flag of every type of block in the file, and that the file has blocks for its
    flags.

    INT4 blocks need no flag in a file with the flag INT2. The document permits one primary encoding per file (section
    5). If a file has several primary flags, one of them must have blocks, and a note is added.
    """
    magics = {item.storage.block.magic for item in non_dense(located).values()}  # dense blocks have no flag
    primary = {magic: flag for magic, flag in FLAG_OF.items() if state.has(flag)}
    for magic, flag in FLAG_OF.items():
        if magic in magics and not state.has(flag) and not (magic == INT4 and state.has(Flags.INT2)):
            raise state.refuse("squizd.flag-missing", f"expected flag {flag.name} with {magic.decode()} blocks")
    names = ", ".join(str(flag.name) for flag in primary.values())
    if primary and not magics & primary.keys():
        raise state.refuse("squizd.flag-empty", f"expected blocks of flag {names}, but there are none")
    if len(primary) > 1:
        state.notes.append(("squizd.primary-flags", f"expected one primary encoding per file, found flags {names}"))


def _check_index_scales(state: _State, tables: Sequence[int], masks: dict[int, int]) -> None:
    """Check that the ``scale_offset`` of each layer is the offset of its masks; without masks, the offset of a table,
    or 0.
    """
    if state.has(Flags.SPARSE) and not masks:
        raise state.refuse("squizd.sparse-missing", "expected masks with flag SPARSE, but there are none")
    if masks and not state.has(Flags.SPARSE):
        raise state.refuse("squizd.flag-missing", "expected flag SPARSE with masks")
    inside = len(state.index.inside())
    if state.has(Flags.SPARSE) and inside != state.header.sparsity.layers:
        raise state.refuse(
            "squizd.sparse-layers",
            f"expected masks in n_sparse_layers = {state.header.sparsity.layers} layers, found {inside}",
        )
    allowed = {0, *tables}
    offsets = state.index.column("scales")
    is_correct = np.isin(offsets, np.array([*allowed], np.uint64))
    for layer, offset in masks.items():
        is_correct[layer] = offsets[layer] == offset
    if not is_correct.all():
        layer = int(np.argmin(is_correct))
        expected = {masks[layer]} if layer in masks else allowed
        message = f"expected scale_offset of layer {layer} at {sorted(expected)}, found {offsets[layer]}"
        raise state.refuse("squizd.scale-offset", message)


def _appendices(
    state: _State, directory: Directory | None, tail: int, main: Sequence[tuple[int, int]]
) -> tuple[Attachments, int]:
    draft = None
    coreml = None
    if state.has(Flags.EAGLE):
        meta = state.header.draft
        _check_draft_range(state, tail)
        note_gaps(state.source, _NOTHING, [(tail, meta.offset)], state.remarks, _BETWEEN)
        draft = tensors_of(state.file, _draft(state, directory, main), verify=state.verify)
        tail = meta.offset + meta.length
    if state.has(Flags.ANE_COREML):
        coreml, tail = _coreml(state, directory, tail)
    return Attachments(draft, coreml, draft_vocab=state.header.draft.vocab if draft is not None else 0), tail


def _check_draft_range(state: _State, tail: int) -> None:
    meta = state.header.draft
    if meta.offset < tail or meta.length > state.source.size - meta.offset or meta.length < DRAFT_HEADER:
        raise state.refuse(
            "squizd.draft-out-of-bounds",
            f"expected a draft head between byte {tail} and the file's end {state.source.size}, found "
            f"{meta.length} bytes at {meta.offset}",
        )


def _draft(state: _State, directory: Directory | None, main: Sequence[tuple[int, int]]) -> Mapping[str, Located]:
    """Return the tensors of the draft head in its section.

    If the head has no tables, its scales are the last entries of the model's tables, ``main``. There is one entry for
    each quantized matrix, in the order of the blocks.
    """
    source = state.source
    meta = state.header.draft
    location = f"{state.location}: draft head"
    end = meta.offset + meta.length
    head = read_bytes(source, meta.offset, DRAFT_HEADER)
    layers = int.from_bytes(head[4:], "little")
    if head[:4] != DRAFT_MAGIC:
        raise FormatError("squizd.draft-magic", f"expected {DRAFT_MAGIC!r}, found {head[:4]!r}", where=location)
    if layers != meta.layers:
        raise FormatError(
            "squizd.draft-layers",
            f"expected n_draft_layers {meta.layers} like the header, found {layers}",
            where=location,
        )
    span = (meta.offset + DRAFT_HEADER, end)
    blocks = _draft_blocks(state)
    if not blocks:
        raise FormatError(
            "squizd.draft-missing", "expected weight blocks in the draft head, but there are none", where=location
        )
    blocks_end = end_of(blocks, span[0])
    table_ranges, tail = tables(source, blocks_end, location)
    if tail > end:
        raise FormatError(
            "squizd.draft-out-of-bounds",
            f"expected scale tables that end by byte {end} with the draft head, found tables up to {tail}",
            where=location,
        )
    draft_directory, raw, tail = read_directory(source, tail, end, location)
    note_gaps(source, _NOTHING, [(tail, end)], state.notes)
    digest = directory.draft_digest if directory is not None else None
    if digest is not None and state.verify:
        algorithm = checksums.algorithm_of(digest, "squizd.digest", location)
        if algorithm is not None:
            checksums.check(digest, checksums.digest(algorithm, raw), "squizd.draft-digest", location)
    if draft_directory is None:
        before = 0 if table_ranges or directory is not None else state.scaled
        located = name_blocks(source, blocks, table_ranges or main, location, "draft", other_entries=(before, 0))
        names = names_by_shape([(item.spec.shape, item.spec.dtype) for item in located.values()], layers)
        return {
            name: replace(item, spec=replace(item.spec, name=name))
            for name, item in zip(names, located.values(), strict=True)
        }
    return locate(source, draft_directory, np.array([(span[0], blocks_end)]), table_ranges, state.notes, location)


def _draft_blocks(state: _State) -> list[ScannedBlock]:
    meta = state.header.draft
    span = (meta.offset + DRAFT_HEADER, meta.offset + meta.length)
    return scan_blocks(state.source, [span], f"{state.location}: draft head", stops=(SCALES_MAGIC, DIRECTORY_MAGIC))


def _draft_entries(state: _State, tail: int) -> int:
    """Return the number of entries of the model's scale tables that belong to the draft head; 0 if the head has
    tables.
    """
    if not state.has(Flags.EAGLE):
        return 0
    _check_draft_range(state, tail)
    blocks = _draft_blocks(state)
    blocks_end = end_of(blocks, state.header.draft.offset + DRAFT_HEADER)
    draft_tables = tables(state.source, blocks_end, f"{state.location}: draft head")[0]
    return 0 if draft_tables else sum(scanned.block.magic in SCALED for scanned in blocks)


def _coreml(state: _State, directory: Directory | None, tail: int) -> tuple[Part, int]:
    """Return the Core ML package, which is the last section, and the offset of its end."""
    source = state.source
    start = skip_zeros(source, tail, source.size)
    head = read_bytes(source, start, min(COREML_HEADER, source.size - start))
    if head[:4] != COREML_MAGIC or len(head) < COREML_HEADER:
        raise state.refuse(
            "squizd.coreml-missing",
            f"expected {COREML_MAGIC!r} at byte {start} with flag ANE_COREML, found {head[:4]!r}",
        )
    length = int.from_bytes(head[4:], "little")
    if length != state.limit - start - COREML_HEADER:
        raise state.refuse(
            "squizd.coreml-length",
            f"expected a section of {state.limit - start - COREML_HEADER} bytes, up to the directory or the end of the "
            f"file, found {length}",
        )
    part = Part(
        dtype="u8",
        length=length,
        source=state.file,
        offset=start + COREML_HEADER,
        digest=directory.coreml_digest if directory is not None else None,
        where=f"{state.location}: Core ML package",
        verify=state.verify,
    )
    return part, state.limit


def _directory_offset(state: _State, tables_end: int) -> int:
    """Return the offset of the directory: after the appendices, or in older files before them, at ``tables_end``.

    If an appendix is invalid, its end is unknown, so that the result is ``tables_end``; reading the appendix raises the
    error.
    """
    source = state.source
    meta = state.header.draft
    if read_bytes(source, tables_end, min(4, source.size - tables_end)) == DIRECTORY_MAGIC:
        return tables_end
    offset = tables_end
    if state.has(Flags.EAGLE):
        if meta.offset < offset or meta.length > source.size - meta.offset:
            return tables_end
        offset = meta.offset + meta.length
    if state.has(Flags.ANE_COREML):
        start = skip_zeros(source, offset, source.size)
        head = read_bytes(source, start, min(COREML_HEADER, source.size - start))
        length = int.from_bytes(head[4:], "little")
        if head[:4] != COREML_MAGIC or length > source.size - start - COREML_HEADER:
            return tables_end
        offset = start + COREML_HEADER + length
    return offset if read_bytes(source, offset, min(4, source.size - offset)) == DIRECTORY_MAGIC else tables_end


def _require_no_other_directory(state: _State, start: int, end: int) -> None:
    """Raise an error if the file has a directory at another offset than header, index and tables imply."""
    size = state.source.size
    middle = min(state.header.draft.offset, size) if state.has(Flags.EAGLE) else size
    draft_end = min(state.header.draft.offset + state.header.draft.length, size)
    mark = KEY.encode()
    for first, last in ((start, middle), (max(draft_end, end), size) if middle < size else (size, size)):
        previous = b""
        for offset in range(first, last, _CHUNK):
            chunk = previous + read_bytes(state.file, offset, min(_CHUNK, last - offset))
            if mark in chunk:
                raise IntegrityError(
                    "squizd.directory-lost",
                    f"expected the directory after tables and appendices, found its end near byte {offset} and nothing "
                    "before it: the file is damaged",
                    where=state.location,
                )
            previous = chunk[-len(mark) :]


def _check_end(state: _State, tail: int) -> None:
    if tail < state.source.size:
        state.remarks.append(
            ("squizd.trailing-bytes", f"expected the file to end at byte {tail}, found {state.source.size} bytes")
        )
