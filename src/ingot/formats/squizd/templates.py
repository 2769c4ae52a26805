"""What the directory says of tensors: one by one, or but for what differs in those of a kind."""

from __future__ import annotations

from ingot.core import checksums
from ingot.core.chunk_digests import StatedChunks
from ingot.formats.entry_template import EntryTemplate
from ingot.formats.squizd.carry import Form
from ingot.formats.squizd.directory import Entry, encoded
from ingot.formats.squizd.place import Placed, Tables
from ingot.model.layouts.ids import file_id
from ingot.model.spec import TensorSpec

_LAYER, _OFFSET = 2**62, 2**62 + 1  # stand for them: no number in front of them is as large


def template(spec: TensorSpec, form: Form, algorithm: str | None) -> EntryTemplate:
    """Return the entry of a tensor in one part without scales and mask; its numbers are its layer and its offset."""
    digest = None if algorithm is None else checksums.digest(algorithm, b"")
    digests = {} if digest is None else {form.block.pieces[0].role: digest}
    whole = encoded(entry_of(Placed(spec, form, _LAYER), _OFFSET, Tables(), 0, digests, {}))
    return EntryTemplate(whole, (_LAYER, _OFFSET), digest)


def entry_of(
    placed: Placed,
    offset: int,
    tables: Tables,
    tables_start: int,
    digests: dict[str, str],
    chunks: dict[str, StatedChunks],
) -> Entry:
    """Return the directory's entry of a tensor; its mask, which follows later, aside."""
    spec, form = placed.spec, placed.form
    return Entry(
        shape=spec.shape,
        dtype=spec.dtype,
        codec=file_id(spec.codec),
        layer=placed.layer,
        offset=offset,
        params=dict(spec.params),
        scales=form.scale_dtype,
        zeros=any(part.role == "zeros" for part in spec.parts),
        first=(tables.first_at(tables_start, placed), form.first) if form.first else None,
        second=None if form.second is None else (tables.second_at(tables_start, placed), form.second),
        digests=digests,
        chunks=chunks,
    )
