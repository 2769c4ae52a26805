"""Writer of ONNX models: numbers as tensors arrive, then the graph around them (spec/onnx.md, "Writing")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ingot.core.bytes import checksums
from ingot.core.parsing.wire import Hole, Range, length
from ingot.errors import IntegrityError, UnsupportedError
from ingot.formats.base import FormatWriter, WriteOptions
from ingot.formats.onnx.layout import Entry, Layout, TensorPlan
from ingot.formats.onnx.reader import part_of
from ingot.formats.onnx.template import Template
from ingot.formats.shared.order import Order
from ingot.model.artifact import Artifact, Attachments
from ingot.model.bytesource import Buffer, Sink, Target
from ingot.model.part import CHUNK, Part
from ingot.model.spec import TensorSpec


def template_of(attachments: Attachments) -> Template:
    """Return the model whose graph is filled with tensors; raise ``UnsupportedError`` ``onnx.no-graph``."""
    graph = attachments.graph
    if not isinstance(graph, Template):
        raise UnsupportedError(
            "an ONNX model needs a graph around its weights: start from a .onnx file, or name a .onnx file with "
            "--graph",
            rule="onnx.no-graph",
        )
    return graph


def model_size(name: str, artifact: Artifact, options: WriteOptions) -> int:
    """Return the number of bytes of all files of a model, which follows from the specs.

    Raises the errors of ``Layout``.
    """
    layout = Layout(template_of(artifact.attachments), name, artifact.tensors, siblings=options.siblings)
    return layout.size + sum(layout.ends.values())


class OnnxWriter(FormatWriter):
    """A writer that fills the attached graph; raises the errors of ``template_of`` and ``Layout``."""

    def __init__(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> None:
        self._target = target
        self._name = name
        self._order = Order(artifact.tensors, name)
        self._template = template_of(artifact.attachments)
        self._layout = Layout(self._template, name, artifact.tensors, siblings=options.siblings)
        self._current: TensorPlan | None = None
        self._buffered: dict[str, bytearray] = {}
        self._computed: dict[str, Part] = {}
        self._digests: dict[str, checksums.Hasher] = {}
        self._sinks: dict[str, Sink] = {}
        self._written: dict[tuple[str, int], str] = {}

    def begin(self, spec: TensorSpec) -> None:
        """Start the next tensor."""
        self._order.begin(spec)
        plan = self._current = self._layout.plans[spec.name]
        self._digests = {part.role: checksums.hasher("crc32c") for part in spec.parts}
        self._buffered = {
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
        """Append to a part; parts with a conversion, such as zero points, are buffered until ``end``."""
        view = memoryview(data)
        chunk = view.cast("B") if view.nbytes else memoryview(b"")
        position = self._order.write(role, chunk.nbytes)
        assert self._current is not None
        if role in self._buffered:
            self._buffered[role] += chunk
        elif role in self._computed:
            self._require_same(role, position, chunk)
        elif chunk.nbytes:
            self._put(self._current.entry(role), position, chunk)
            self._digests[role].update(chunk)

    def end(self) -> dict[str, Any]:
        """Close the tensor; return a record of the locations of its constants."""
        spec, plan = self._order.end(), self._current
        assert plan is not None
        blobs = [blob for entry in plan.entries if (blob := self._complete(spec.name, entry)) is not None]
        self._current = None
        self._note(spec.name, blobs)
        return {"name": spec.name, "blobs": blobs}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Accept a tensor that an earlier run wrote with the same specs and options."""
        spec = self._order.expect(record["name"])
        entries = self._layout.plans[spec.name].entries
        locations = [self._location_of(entry) for entry in entries if not entry.computed and not _stays(entry)]
        if [(file, offset) for file, offset, *_ in record["blobs"]] != locations:
            raise IntegrityError(
                "writer.record",
                "the earlier run used other offsets in the file: start again without resuming",
                where=spec.name,
            )
        self._note(spec.name, record["blobs"])
        self._order.restored(spec.name)

    def finish(self) -> list[str]:
        """Write the graph, close all files, and return their names."""
        self._order.finish()
        sink = self._sink(self._name)
        position = 0
        for segment in self._layout.segments:
            if isinstance(segment, Range):
                for start, data in self._template.chunks_of(segment, CHUNK):
                    sink.write_at(position + start, data)
            elif not isinstance(segment, Hole):
                sink.write_at(position, segment)
            position += length((segment,))
        sink.truncate(position)
        for name, end in self._layout.ends.items():
            self._sink(name).truncate(end)
        self.abort()
        return [self._name, *self._layout.ends]

    def abort(self) -> None:
        """Close all files in their current state."""
        for sink in self._sinks.values():
            sink.close()
        self._sinks = {}

    def _note(self, name: str, blobs: Sequence[Sequence[Any]]) -> None:
        """Record the digest at each location.

        Constants such as tied weights may share a location in a separate file.
        """
        for file, offset, nbytes, digest in blobs:
            if nbytes and self._written.setdefault((file, offset), digest) != digest:
                raise UnsupportedError(
                    "expected the numbers of the constant at the same location in its file, found other numbers: write "
                    "a "
                    "single file, which can contain both",
                    rule="onnx.shared-data",
                    where=name,
                )

    def _complete(self, name: str, entry: Entry) -> list[Any] | None:
        """Write the missing bytes of an entry; return its file, offset, length and digest."""
        location = f"{name}: {entry.role or entry.name}"
        if entry.computed:
            return None
        if entry.role and entry.role not in self._buffered:
            return [*self._location_of(entry), entry.nbytes, self._digests[entry.role].text()]
        data = self._stored(entry, location)
        if _stays(entry):
            assert entry.existing is not None
            if data != self._template.bytes_of(entry.existing):
                raise UnsupportedError(
                    "expected the numbers of the model, which are encoded one by one and cannot be changed, found "
                    "other numbers",
                    rule="onnx.typed-data",
                    where=location,
                )
            return None
        self._put(entry, 0, memoryview(data))
        return [*self._location_of(entry), len(data), checksums.digest("crc32c", data)]

    def _stored(self, entry: Entry, location: str) -> bytes:
        """Return the contents of a constant: its buffered part, converted if necessary, or repeated zero points."""
        if not entry.role:
            assert entry.new is not None
            assert entry.new.point is not None
            return entry.new.point.stored()
        buffered = bytes(self._buffered[entry.role])
        if entry.conversion is None:
            return buffered
        if entry.existing is not None:  # the padding of rows has no meaning, so it stays unchanged
            present = self._template.bytes_of(entry.existing)
            if entry.conversion.to_part(present) == buffered:
                return present
        return entry.conversion.to_stored(buffered, location)

    def _require_same(self, role: str, start: int, chunk: memoryview) -> None:
        """Raise an error if numbers differ from those that the model computes from its own constants."""
        part = self._computed[role]
        expected = bytearray(chunk.nbytes)
        part.readinto(start, memoryview(expected))
        if expected != chunk:
            raise UnsupportedError(
                "the model computes these numbers from constants that stay unchanged, but the tensor has other "
                "numbers; "
                "write into a model that stores the constant directly",
                rule="onnx.unsupported",
                where=part.where,
            )

    def _put(self, entry: Entry, start: int, chunk: memoryview) -> None:
        if chunk.nbytes:
            file, offset = self._location_of(entry)
            self._sink(file).write_at(offset + start, chunk)

    def _location_of(self, entry: Entry) -> tuple[str, int]:
        if entry.external is not None:
            folder = self._name.rpartition("/")[0]
            location = entry.external.location
            return f"{folder}/{location}" if folder else location, entry.external.offset
        assert entry.offset is not None
        return self._name, entry.offset

    def _sink(self, file: str) -> Sink:
        if file not in self._sinks:
            self._sinks[file] = self._target.create(file)
        return self._sinks[file]


def _stays(entry: Entry) -> bool:
    """Return whether a constant stays unchanged in a field of its TensorProto that has one entry per number."""
    return entry.external is None and entry.offset is None
