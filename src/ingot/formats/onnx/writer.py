"""Writing: numbers as tensors come, then the graph around them (spec/onnx.md, "Writing")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ingot.core import checksums
from ingot.core.wire import Hole, Range, length
from ingot.errors import IntegrityError, UnsupportedError
from ingot.formats.base import FormatWriter, WriteOptions
from ingot.formats.onnx.layout import Entry, Layout, TensorPlan
from ingot.formats.onnx.reader import part_of
from ingot.formats.onnx.template import Template
from ingot.formats.order import Order
from ingot.model.artifact import Artifact
from ingot.model.attachments import Attachments
from ingot.model.bytesource import Buffer, Sink, Target
from ingot.model.part import CHUNK, Part
from ingot.model.spec import TensorSpec


def template_of(attachments: Attachments) -> Template:
    """Return the model whose graph the tensors go into; raises ``UnsupportedError`` ``onnx.no-graph``."""
    graph = attachments.graph
    if not isinstance(graph, Template):
        raise UnsupportedError(
            "an ONNX model needs a graph around its weights: start from a .onnx file, or name one with --graph",
            rule="onnx.no-graph",
        )
    return graph


def model_size(name: str, artifact: Artifact, options: WriteOptions) -> int:
    """Return the bytes of all files of a model, from the specs alone; raises as ``Layout``."""
    layout = Layout(template_of(artifact.attachments), name, artifact.tensors, beside=options.siblings)
    return layout.size + sum(layout.ends.values())


class OnnxWriter(FormatWriter):
    """A ``FormatWriter`` into the graph that is attached; raises as ``template_of`` and ``Layout``."""

    def __init__(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> None:
        self._target, self._name = target, name
        self._order = Order(artifact.tensors, name)
        self._template = template_of(artifact.attachments)
        self._layout = Layout(self._template, name, artifact.tensors, beside=options.siblings)
        self._current: TensorPlan | None = None
        self._held: dict[str, bytearray] = {}
        self._computed: dict[str, Part] = {}
        self._digests: dict[str, checksums.Hasher] = {}
        self._sinks: dict[str, Sink] = {}
        self._written: dict[tuple[str, int], str] = {}

    def begin(self, spec: TensorSpec) -> None:
        """Start the next tensor."""
        self._order.begin(spec)
        plan = self._current = self._layout.plans[spec.name]
        self._digests = {part.role: checksums.hasher("crc32c") for part in spec.parts}
        self._held = {
            entry.role: bytearray()
            for entry in plan.entries
            if entry.role and not entry.computed and (entry.conversion is not None or _stays(entry))
        }
        self._computed = {
            entry.role: part_of(self._template, plan.planned.site, entry.role)
            for entry in plan.entries
            if entry.computed
        }

    def write(self, role: str, data: Buffer) -> None:
        """Append to a part; what is stored in another form, as zero points are, is held until ``end``."""
        view = memoryview(data)
        piece = view.cast("B") if view.nbytes else memoryview(b"")
        position = self._order.write(role, piece.nbytes)
        assert self._current is not None
        if role in self._held:
            self._held[role] += piece
        elif role in self._computed:
            self._require_same(role, position, piece)
        elif piece.nbytes:
            self._put(self._current.entry(role), position, piece)
            self._digests[role].update(piece)

    def end(self) -> dict[str, Any]:
        """Close the tensor; the record tells where its constants lie."""
        spec, plan = self._order.end(), self._current
        assert plan is not None
        blobs = [blob for entry in plan.entries if (blob := self._complete(spec.name, entry)) is not None]
        self._current = None
        self._note(spec.name, blobs)
        return {"name": spec.name, "blobs": blobs}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Take back a tensor that an earlier run wrote with the same specs and options."""
        spec = self._order.expect(record["name"])
        entries = self._layout.plans[spec.name].entries
        places = [self._place(entry) for entry in entries if not entry.computed and not _stays(entry)]
        if [(file, offset) for file, offset, *_ in record["blobs"]] != places:
            raise IntegrityError(
                "writer.record", "the earlier run laid the file out differently: start anew", where=spec.name
            )
        self._note(spec.name, record["blobs"])
        self._order.restored(spec.name)

    def finish(self) -> list[str]:
        """Write the graph, close all files; return their names."""
        self._order.finish()
        sink, position = self._sink(self._name), 0
        for piece in self._layout.pieces:
            if isinstance(piece, Range):
                for start, data in self._template.copied(piece, CHUNK):
                    sink.write_at(position + start, data)
            elif not isinstance(piece, Hole):
                sink.write_at(position, piece)
            position += length((piece,))
        sink.truncate(position)
        for name, end in self._layout.ends.items():
            self._sink(name).truncate(end)
        self.abort()
        return [self._name, *self._layout.ends]

    def abort(self) -> None:
        """Close all files as they are."""
        for sink in self._sinks.values():
            sink.close()
        self._sinks = {}

    def _note(self, name: str, blobs: Sequence[Sequence[Any]]) -> None:
        """Note what lies where: constants may share a place in a file beside the model, as tied weights do."""
        for file, offset, nbytes, digest in blobs:
            if nbytes and self._written.setdefault((file, offset), digest) != digest:
                raise UnsupportedError(
                    "expected the numbers of the constant that has the same place in its file, found others: write a "
                    "single file, which takes both in",
                    rule="onnx.shared-data",
                    where=name,
                )

    def _complete(self, name: str, entry: Entry) -> list[Any] | None:
        """Write what an entry still lacks; return its file, offset, length and digest."""
        where = f"{name}: {entry.role or entry.name}"
        if entry.computed:
            return None
        if entry.role and entry.role not in self._held:
            return [*self._place(entry), entry.nbytes, self._digests[entry.role].text()]
        data = self._stored(entry, where)
        if _stays(entry):
            assert entry.kept is not None
            if data != self._template.bytes_of(entry.kept):
                raise UnsupportedError(
                    "expected the numbers of the model, which stand in it one by one, found others",
                    rule="onnx.typed-data",
                    where=where,
                )
            return None
        self._put(entry, 0, memoryview(data))
        return [*self._place(entry), len(data), checksums.digest("crc32c", data)]

    def _stored(self, entry: Entry, where: str) -> bytes:
        """Return the bytes of a constant that is made of a whole part, or of none."""
        if not entry.role:
            assert entry.numbers is not None
            assert entry.numbers.same is not None
            return entry.numbers.same.stored()
        held = bytes(self._held[entry.role])
        if entry.conversion is None:
            return held
        if entry.kept is not None:  # what rows are padded with says nothing, and stays
            own = self._template.bytes_of(entry.kept)
            if entry.conversion.to_part(own) == held:
                return own
        return entry.conversion.to_stored(held, where)

    def _require_same(self, role: str, start: int, chunk: memoryview) -> None:
        """Refuse other numbers than those that the model computes from constants which it keeps."""
        part = self._computed[role]
        expected = bytearray(chunk.nbytes)
        part.readinto(start, memoryview(expected))
        if expected != chunk:
            raise UnsupportedError(
                "the model computes these numbers from constants that it keeps, and the tensor has other ones; "
                "expected the model's own: write into a model whose constant is stored plainly",
                rule="onnx.unsupported",
                where=part.where,
            )

    def _put(self, entry: Entry, start: int, piece: memoryview) -> None:
        if piece.nbytes:
            file, offset = self._place(entry)
            self._sink(file).write_at(offset + start, piece)

    def _place(self, entry: Entry) -> tuple[str, int]:
        if entry.place is not None:
            folder = self._name.rpartition("/")[0]
            location = entry.place.location
            return f"{folder}/{location}" if folder else location, entry.place.offset
        assert entry.offset is not None
        return self._name, entry.offset

    def _sink(self, file: str) -> Sink:
        if file not in self._sinks:
            self._sinks[file] = self._target.create(file)
        return self._sinks[file]


def _stays(entry: Entry) -> bool:
    """Whether a constant stays in the field of its type, as it is."""
    return entry.place is None and entry.offset is None
