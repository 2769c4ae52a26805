"""Reading ``.squizd``: header, layer index, scale tables, directory, appendices; no weights."""

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
from ingot.ext.squizd.details import details
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
from ingot.ext.squizd.section_reader import (
    closely,
    locate,
    masks_by_layer,
    note_gaps,
    read_directory,
    skip_zeros,
)
from ingot.ext.squizd.tensors import Located, tensors_of
from ingot.ext.squizd.walk import SCALED, Walked, end_of, matrices_of, name_blocks, walk, with_mask
from ingot.formats.base import Catalog
from ingot.model.attachments import Attachments
from ingot.model.bytesource import ByteSource
from ingot.model.draft_head_names import names_by_shape
from ingot.model.features import KNOWN, Flags
from ingot.model.part import Part
from ingot.model.reading.ranges import HeaderSource, read_bytes

_CHUNK = 4 << 20
_BETWEEN = "squizd.between"
_NOTHING = np.empty((0, 2), np.int64)


@dataclass(slots=True)
class _Read:
    """What was found so far. ``source`` is read ahead; weights are read from ``file``.

    ``layers`` are spans of the layers; one without tensors may state any offset in the file.
    """

    source: HeaderSource
    file: ByteSource
    header: Header
    index: LayerIndex
    notes: Notes
    verify: bool
    remarks: Notes = field(default_factory=list)
    limit: int = 0  # where the last appendix has to end
    scaled: int = 0  # quantized matrices of a model without names
    layers: Array = field(init=False)

    def __post_init__(self) -> None:
        self.layers = self.index.spans()

    @property
    def where(self) -> str:
        return self.source.name

    def has(self, flag: Flags) -> bool:
        return bool(self.header.flags & flag)

    def refuse(self, rule: str, message: str) -> FormatError:
        return FormatError(rule, message, where=self.where)


def read_catalog(source: ByteSource, name: str = "", *, verify: bool = True) -> Catalog:
    """Validate everything in a file but its weights, and locate its tensors.

    Parameters
    ----------
    source : ByteSource
        Belongs to the catalog from here on, unless this raises.
    name : str
        The file's name in its store; by default the source's.
    verify : bool
        Whether parts check their digests when read whole.

    Raises
    ------
    FormatError, IntegrityError, UnsupportedError
        A rule of ``spec/squizd.md``.
    """
    state = _opened(source, verify)
    file, source, header = state.file, state.source, state.header
    begin = HEADER + INDEX_ENTRY * header.layer_count
    start = max(begin, int(state.layers[:, 1].max()))
    filled = state.layers[state.layers[:, 1] > state.layers[:, 0]]
    note_gaps(source, filled, [(begin, start)], state.remarks, _BETWEEN)
    places, behind = _tables(state, start)
    at = _directory_place(state, behind)
    directory, raw, end = read_directory(source, at, source.size, state.where, begin)
    if directory is None:
        _require_none_lost(state, start, at)
        located: Mapping[str, Located]
        located, starts = _without_directory(state, places, behind), _masks(state)
    else:
        if verify:
            check_directory(directory, memoryview(raw)[begin:], memoryview(raw)[:begin], state.where)
        located = locate(source, directory, state.layers, places, state.notes, state.where)
        starts = masks_by_layer(located, directory)
    _check_flags(state, located)
    absent = (start, behind) if directory is None else (start, behind, at + DIRECTORY_HEADER)  # where tables would be
    _check_index_scales(state, [place - TABLE_HEADER for place, _ in places] or absent, starts)
    early = at == behind  # as files had it before the appendices of the document came first
    state.limit = source.size if early else at
    attachments, tail = _appendices(state, directory, end if early else behind, places)
    _check_end(state, tail if early else max(tail, end))
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
        features=Flags(header.flags & KNOWN),
        manifest_digest=directory is not None and directory.ingot_digest is not None,
    )


def _opened(file: ByteSource, verify: bool) -> _Read:
    """Read header and index."""
    source = HeaderSource(file)
    header, notes = read_header(source)
    index, more = read_index(source, header)
    return _Read(source, file, header, index, notes + more, verify)


def _tables(state: _Read, start: int) -> tuple[list[tuple[int, int]], int]:
    """Find the scale tables behind the last weight block; fewer than 64 zero bytes may lie between."""
    behind = skip_zeros(state.source, start, state.source.size)
    if read_bytes(state.source, behind, min(4, state.source.size - behind)) in (SCALES_MAGIC, DIRECTORY_MAGIC):
        start = behind
    return tables(state.source, start, state.where)


def _without_directory(state: _Read, places: Sequence[tuple[int, int]], tail: int) -> dict[str, Located]:
    state.remarks.append(("squizd.no-directory", "no directory: names, element types and digests are not stored"))
    starts = _masks(state)
    spans = [(start, starts.get(layer, end)) for layer, (start, end) in enumerate(state.layers.tolist())]
    blocks = walk(state.source, spans, state.where)
    state.scaled = sum(walked.block.magic in SCALED for walked in blocks)
    share = (0, _draft_entries(state, tail))
    located = name_blocks(state.source, blocks, places, state.where, share=share)
    return _with_masks(state, blocks, located, starts) if starts else located


def _with_masks(
    state: _Read, blocks: Sequence[Walked], located: dict[str, Located], starts: Mapping[int, int]
) -> dict[str, Located]:
    """Return the tensors with the masks that they lie under, as far as the file shows how these are to be read."""
    matrices = matrices_of(blocks)
    names = {(walked.layer, walked.number): name for walked, name in zip(blocks, located, strict=True)}
    layers = [layer_masks(layer, matrices[layer], at, _mask_bytes(state, layer, at)) for layer, at in starts.items()]

    def filled(key: Key, axis: int, block: int, wanted: Channels) -> Channels | None:
        return filled_blocks(state.file, located[names[key]], axis, block, wanted)

    reading = reading_of(layers, state.header.sparsity, state.where, filled)
    if reading is None:
        state.remarks.append(
            ("squizd.masks-apart", "masks do not tell which matrices and bits they are for: weights are as stored")
        )
        return located
    if not reading.usual:
        state.remarks.append(("squizd.mask-order", reading.describe()))
    masked = {names[key]: with_mask(located[names[key]], placed) for key, placed in reading.places.items()}
    return {**located, **masked}


def _mask_bytes(state: _Read, layer: int, at: int) -> bytes:
    """Read a layer's masks: from ``at`` to its end."""
    size = int(state.layers[layer, 1]) - at
    if size > _CHUNK:
        raise state.refuse("squizd.sparse-masks", f"expected masks of at most {_CHUNK} bytes a layer, found {size}")
    return read_bytes(state.source, at, size)


def _masks(state: _Read) -> dict[int, int]:
    """Return where masks begin in the layers that have them: ``scale_offset`` lies in the layer then."""
    inside = state.index.inside().tolist() if state.has(Flags.SPARSE) else ()
    return {layer: state.index[layer].scales for layer in inside}


def _check_flags(state: _Read, located: Mapping[str, Located]) -> None:
    """Check that blocks have their flag, and flags have blocks; INT4 blocks may stand in an INT2 file.

    Blocks are told apart by their magic, so a file with several primary flags is read if one of them has blocks. The
    document allows one primary encoding per file (section 5), so this is a note.
    """
    magics = {item.form.block.magic for item in closely(located).values()}  # the others have no flag
    primary = {magic: flag for magic, flag in FLAG_OF.items() if state.has(flag)}
    for magic, flag in FLAG_OF.items():
        if magic in magics and not state.has(flag) and not (magic == INT4 and state.has(Flags.INT2)):
            raise state.refuse("squizd.flag-missing", f"expected flag {flag.name} with {magic.decode()} blocks")
    names = ", ".join(str(flag.name) for flag in primary.values())
    if primary and not magics & primary.keys():
        raise state.refuse("squizd.flag-empty", f"expected blocks of flag {names}, found none")
    if len(primary) > 1:
        state.notes.append(("squizd.primary-flags", f"expected one primary encoding per file, found flags {names}"))


def _check_index_scales(state: _Read, tables: Sequence[int], masks: dict[int, int]) -> None:
    """``scale_offset`` points to the layer's mask where it has one, else to one of the ``tables`` or nowhere."""
    if state.has(Flags.SPARSE) and not masks:
        raise state.refuse("squizd.sparse-missing", "expected masks with flag SPARSE, found none")
    if masks and not state.has(Flags.SPARSE):
        raise state.refuse("squizd.flag-missing", "expected flag SPARSE with masks")
    inside = len(state.index.inside())
    if state.has(Flags.SPARSE) and inside != state.header.sparsity.layers:
        raise state.refuse(
            "squizd.sparse-layers",
            f"expected masks in n_sparse_layers = {state.header.sparsity.layers} layers, found {inside}",
        )
    allowed, found = {0, *tables}, state.index.column("scales")
    right = np.isin(found, np.array([*allowed], np.uint64))
    for layer, at in masks.items():
        right[layer] = found[layer] == at
    if not right.all():
        layer = int(np.argmin(right))
        wanted = {masks[layer]} if layer in masks else allowed
        message = f"expected scale_offset of layer {layer} at {sorted(wanted)}, found {found[layer]}"
        raise state.refuse("squizd.scale-offset", message)


def _appendices(
    state: _Read, directory: Directory | None, tail: int, main: Sequence[tuple[int, int]]
) -> tuple[Attachments, int]:
    draft, coreml = None, None
    if state.has(Flags.EAGLE):
        meta = state.header.draft
        _check_draft_place(state, tail)
        note_gaps(state.source, _NOTHING, [(tail, meta.offset)], state.remarks, _BETWEEN)
        draft = tensors_of(state.file, _draft(state, directory, main), verify=state.verify)
        tail = meta.offset + meta.length
    if state.has(Flags.ANE_COREML):
        coreml, tail = _coreml(state, directory, tail)
    return Attachments(draft, coreml, draft_vocab=state.header.draft.vocab if draft is not None else 0), tail


def _check_draft_place(state: _Read, tail: int) -> None:
    meta = state.header.draft
    if meta.offset < tail or meta.length > state.source.size - meta.offset or meta.length < DRAFT_HEADER:
        raise state.refuse(
            "squizd.draft-out-of-bounds",
            f"expected a draft head between byte {tail} and the file's end {state.source.size}, found "
            f"{meta.length} bytes at {meta.offset}",
        )


def _draft(state: _Read, directory: Directory | None, main: Sequence[tuple[int, int]]) -> Mapping[str, Located]:
    """Locate the tensors of the draft head in its section; a head without tables has its entries in the ``main`` ones.

    These are the last ones then: one for each quantized matrix, in the order of the blocks.
    """
    source, meta, where = state.source, state.header.draft, f"{state.where}: draft head"
    end = meta.offset + meta.length
    head = read_bytes(source, meta.offset, DRAFT_HEADER)
    layers = int.from_bytes(head[4:], "little")
    if head[:4] != DRAFT_MAGIC:
        raise FormatError("squizd.draft-magic", f"expected {DRAFT_MAGIC!r}, found {head[:4]!r}", where=where)
    if layers != meta.layers:
        raise FormatError(
            "squizd.draft-layers",
            f"expected n_draft_layers {meta.layers} as in the header, found {layers}",
            where=where,
        )
    span = (meta.offset + DRAFT_HEADER, end)
    blocks = _draft_blocks(state)
    if not blocks:
        raise FormatError("squizd.draft-missing", "expected weight blocks in the draft head, found none", where=where)
    behind = end_of(blocks, span[0])
    places, tail = tables(source, behind, where)
    if tail > end:
        raise FormatError(
            "squizd.draft-out-of-bounds",
            f"expected scale tables that end by byte {end} with the draft head, found some up to {tail}",
            where=where,
        )
    own, raw, tail = read_directory(source, tail, end, where)
    note_gaps(source, _NOTHING, [(tail, end)], state.notes)
    stated = directory.draft_digest if directory is not None else None
    if stated is not None and state.verify:
        algorithm = checksums.known(stated, "squizd.digest", where)
        if algorithm is not None:
            checksums.check(stated, checksums.digest(algorithm, raw), "squizd.draft-digest", where)
    if own is None:
        before = 0 if places or directory is not None else state.scaled
        located = name_blocks(source, blocks, places or main, where, "draft", share=(before, 0))
        names = names_by_shape([(item.spec.shape, item.spec.dtype) for item in located.values()], layers)
        return {
            name: replace(item, spec=replace(item.spec, name=name))
            for name, item in zip(names, located.values(), strict=True)
        }
    return locate(source, own, np.array([(span[0], behind)]), places, state.notes, where)


def _draft_blocks(state: _Read) -> list[Walked]:
    meta = state.header.draft
    span = (meta.offset + DRAFT_HEADER, meta.offset + meta.length)
    return walk(state.source, [span], f"{state.where}: draft head", stops=(SCALES_MAGIC, DIRECTORY_MAGIC))


def _draft_entries(state: _Read, tail: int) -> int:
    """Return how many entries of the main tables are those of a draft head without tables of its own."""
    if not state.has(Flags.EAGLE):
        return 0
    _check_draft_place(state, tail)
    blocks = _draft_blocks(state)
    behind = end_of(blocks, state.header.draft.offset + DRAFT_HEADER)
    own = tables(state.source, behind, f"{state.where}: draft head")[0]
    return 0 if own else sum(walked.block.magic in SCALED for walked in blocks)


def _coreml(state: _Read, directory: Directory | None, tail: int) -> tuple[Part, int]:
    """Find the Core ML package: the last section, which ends with the file."""
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
        where=f"{state.where}: Core ML package",
        verify=state.verify,
    )
    return part, state.limit


def _directory_place(state: _Read, behind: int) -> int:
    """Return where the directory is: at the end, or, as in earlier files, before the appendices, at ``behind``.

    What is wrong with an appendix is said when it is read: here it is none that could be passed over.
    """
    source, meta = state.source, state.header.draft
    if read_bytes(source, behind, min(4, source.size - behind)) == DIRECTORY_MAGIC:
        return behind
    at = behind
    if state.has(Flags.EAGLE):
        if meta.offset < at or meta.length > source.size - meta.offset:
            return behind
        at = meta.offset + meta.length
    if state.has(Flags.ANE_COREML):
        start = skip_zeros(source, at, source.size)
        head = read_bytes(source, start, min(COREML_HEADER, source.size - start))
        length = int.from_bytes(head[4:], "little")
        if head[:4] != COREML_MAGIC or length > source.size - start - COREML_HEADER:
            return behind
        at = start + COREML_HEADER + length
    return at if read_bytes(source, at, min(4, source.size - at)) == DIRECTORY_MAGIC else behind


def _require_none_lost(state: _Read, start: int, end: int) -> None:
    """Refuse a file whose directory is not where it must be: header, index or tables lead past it."""
    size = state.source.size
    middle = min(state.header.draft.offset, size) if state.has(Flags.EAGLE) else size
    behind = min(state.header.draft.offset + state.header.draft.length, size)
    mark = KEY.encode()
    for first, last in ((start, middle), (max(behind, end), size) if middle < size else (size, size)):
        previous = b""
        for at in range(first, last, _CHUNK):
            piece = previous + read_bytes(state.file, at, min(_CHUNK, last - at))
            if mark in piece:
                raise IntegrityError(
                    "squizd.directory-lost",
                    f"expected the directory behind tables and appendices, found its end near byte {at} and nothing "
                    "before it: the file is damaged",
                    where=state.where,
                )
            previous = piece[-len(mark) :]


def _check_end(state: _Read, tail: int) -> None:
    if tail < state.source.size:
        state.remarks.append(
            ("squizd.trailing-bytes", f"expected the file to end at byte {tail}, found {state.source.size} bytes")
        )
