"""Writer of packages: weights in the order of the tensors, then the program with their offsets (spec/coreml.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ingot.core.bytes import checksums
from ingot.core.parsing.wire import Edits, bytes_field, map_entry
from ingot.errors import IntegrityError, UnsupportedError
from ingot.formats.base import FormatWriter
from ingot.formats.coreml.blob import METADATA, check_last_byte, header, metadata, relocate_metadata
from ingot.formats.coreml.layout import Entry, Layout, TensorPlan
from ingot.formats.coreml.mil import ATTRIBUTES, INPUTS, OPERATIONS, OUTPUTS, TYPE, Operation
from ingot.formats.coreml.package import MANIFEST
from ingot.formats.coreml.reader import part_of
from ingot.formats.coreml.template import Template
from ingot.formats.coreml.types import MilType
from ingot.formats.coreml.values import (
    Value,
    encode_blob,
    encode_immediate,
    encode_offset,
    encode_text,
    encode_type,
)
from ingot.formats.shared.order import Order
from ingot.model.artifact import Artifact, Attachments
from ingot.model.bytesource import Buffer, MemorySource, Sink, Target
from ingot.model.part import CHUNK, Part
from ingot.model.spec import TensorSpec

# attributes of the replaced operation that are dropped; others, such as its name, are copied to the new operation
_DROPPED_ATTRIBUTES = {
    "val",
    "quantized_data",
    "zero_point",
    "scale",
    "axis",
    "indices",
    "lut",
    "shape",
    "nonzero_data",
    "mask",
}
_DROPPED_ATTRIBUTES |= {"source_val", "output_dtype"}


def patch_model(layout: Layout, plans: Sequence[TensorPlan]) -> bytes:
    """Return ``model.mlmodel`` with the offsets and operations of ``plans``."""
    program = layout.template.program
    edits = Edits(program.root)
    names = {function: set(defined) for function, defined in program.defined.items()}
    handled = {id(value) for operation in layout.unused for value in operation.values}
    for operation in layout.unused:
        edits.replace(operation.block, operation.node.tag, operation.node.end, b"")
    for plan in plans:
        handled |= {id(value) for operation in plan.site.operations for value in operation.values}
        if plan.operations:
            _replace(edits, plan, names[plan.site.last.function])
        else:
            _keep(edits, plan)
    for value in program.values():
        if value.blob is not None and id(value) not in handled:
            _set_offset(edits, value, layout.other_blobs[value.blob.file, value.blob.offset].new)
    return edits.apply()


def _keep(edits: Edits, plan: TensorPlan) -> None:
    for entry in plan.entries:
        for value in entry.values:
            if entry.offset is not None:
                _set_offset(edits, value, entry.offset)
            elif entry.data != value.bytes():
                new = encode_immediate(entry.stored.type, entry.stored.dims, entry.data)
                edits.replace(value.node, value.node.start, value.node.end, new)


def _set_offset(edits: Edits, value: Value, offset: int) -> None:
    """Add an edit: a value refers to the blob with metadata at ``offset``."""
    ref = value.blob
    assert ref is not None
    if ref.offset == offset:
        return
    start, end = (ref.field.tag, ref.field.end) if ref.field else (ref.node.end, ref.node.end)
    edits.replace(ref.node, start, end, encode_offset(offset))


def _replace(edits: Edits, plan: TensorPlan, names: set[str]) -> None:
    """Add edits: the operations of ``plan`` replace the last operation of its site, and the others are removed."""
    old = plan.site.last
    for operation in plan.site.operations[:-1]:
        edits.replace(operation.block, operation.node.tag, operation.node.end, b"")
    outputs = [
        [
            unique_name(f"{old.outputs[0].name}_{index}_{output_index}", names)
            for output_index in range(len(planned.outputs))
        ]
        for index, planned in enumerate(plan.operations[:-1])
    ]
    replacements = []
    for index, planned in enumerate(plan.operations):
        last = index == len(plan.operations) - 1
        remaining = _copied_fields(old) if last else _outputs(outputs[index], planned.outputs)
        body = bytes_field(TYPE, planned.type) + _params(plan, index, outputs) + remaining
        replacements.append(bytes_field(OPERATIONS, body))
    edits.replace(old.block, old.node.tag, old.node.end, b"".join(replacements))


def _params(plan: TensorPlan, index: int, outputs: Sequence[Sequence[str]]) -> bytes:
    """Return the encoded parameters of a new operation: attributes, or inputs that are values or names."""
    planned = plan.operations[index]
    values = [(item.key, _value(plan, _entry_of(plan, (index, item.key)))) for item in planned.stored]
    values += [
        (key, _value(plan, _entry_of(plan, (operation_index, stored_key))))
        for key, operation_index, stored_key in planned.again
    ]
    if planned.attributes:
        return b"".join(map_entry(ATTRIBUTES, key, value) for key, value in values)
    bindings = [(key, bytes_field(2, value)) for key, value in values]
    bindings += [
        (key, bytes_field(1, outputs[operation_index][output])) for key, operation_index, output in planned.bound
    ]
    return b"".join(map_entry(INPUTS, key, bytes_field(1, binding)) for key, binding in bindings)


def _entry_of(plan: TensorPlan, key: tuple[int, str]) -> Entry:
    return next(entry for entry in plan.entries if entry.key == key)


def _value(plan: TensorPlan, entry: Entry) -> bytes:
    stored = entry.stored
    if entry.offset is None:
        return encode_immediate(stored.type, stored.dims, entry.data)
    return encode_blob(stored.type, stored.dims, plan.file, entry.offset)


def _copied_fields(old: Operation) -> bytes:
    """Return the encoded fields of ``old`` that its replacement keeps: outputs, attributes, unknown fields."""
    data = old.node.data
    return b"".join(
        data[field.tag : field.end]
        for field, key in old.fields
        if field.number not in (TYPE, INPUTS) and not (field.number == ATTRIBUTES and key in _DROPPED_ATTRIBUTES)
    )


def _outputs(names: Sequence[str], types: Sequence[tuple[MilType, tuple[int, ...]]]) -> bytes:
    """Return the encoded outputs of a new operation that feeds another one, and its attribute ``name``."""
    encoded = b"".join(
        bytes_field(OUTPUTS, bytes_field(1, name) + bytes_field(2, encode_type(type, dims)))
        for name, (type, dims) in zip(names, types, strict=True)
    )
    return encoded + map_entry(ATTRIBUTES, "name", encode_text(names[0]))


def unique_name(base: str, names: set[str]) -> str:
    """Return a name based on ``base`` that is not in ``names``, and add it to them."""
    name = base
    number = 1
    while name in names:
        name = f"{base}_{number}"
        number = number + 1
    names.add(name)
    return name


def template_of(attachments: Attachments) -> Template:
    """Return the package whose program is filled with tensors.

    Raises ``UnsupportedError`` ``coreml.no-program``.
    """
    program = attachments.program
    if program is None:
        raise UnsupportedError(
            "a Core ML package needs a program around its weights: make one with `ingot extract MODEL --model -o "
            "X.mlpackage` and start from X.mlpackage, or name a package with --program",
            rule="coreml.no-program",
        )
    return program if isinstance(program, Template) else Template(program)


def package_size(artifact: Artifact) -> int:
    """Return the number of bytes of all files of a package, which follows from the specs."""
    specs = artifact.tensors
    template = template_of(artifact.attachments)
    layout = Layout(template, specs)
    plans: list[TensorPlan] = []
    for spec in specs:
        plan = layout.plan(spec)
        layout.place_other_blobs(*plan.site.first_offset)
        layout.assign_offsets(plan)
        for entry in plan.entries:
            if entry.inline:
                entry.data = entry.values[0].bytes() if entry.values else bytes(entry.nbytes)
        plans.append(plan)
    layout.place_other_blobs()
    files = sum(end.end for end in layout.files.values())
    other_bytes = sum(template[path].length for path in (MANIFEST, *template.other_files))
    return files + other_bytes + len(patch_model(layout, plans))


class CoremlWriter(FormatWriter):
    """A writer that fills the attached program.

    Raises the errors of ``template_of`` and ``Layout``.
    """

    def __init__(self, target: Target, artifact: Artifact) -> None:
        specs = artifact.tensors
        self._target = target
        self._specs = list(specs)
        self._order = Order(specs)
        self._template = template_of(artifact.attachments)
        self._layout = Layout(self._template, specs)
        self._plans: list[TensorPlan] = []
        self._current: TensorPlan | None = None
        self._buffered: dict[str, bytearray] = {}
        self._fixed: dict[str, Part] = {}
        self._last: dict[str, int] = {}
        self._digests: dict[str, checksums.Hasher] = {}
        self._sinks: dict[str, Sink] = {}

    def begin(self, spec: TensorSpec) -> None:
        """Start the next tensor, after copying blobs without a tensor that precede it in the template."""
        self._order.begin(spec)
        plan = self._layout.plan(spec)
        self._copy_left(*plan.site.first_offset)
        self._layout.assign_offsets(plan)
        roles = [part.role for part in spec.parts]
        self._last = dict.fromkeys(roles, 0)
        self._digests = {role: checksums.hasher("crc32c") for role in roles}
        entries = {role: plan.entry(role) for role in roles}
        self._fixed = {
            role: part_of(self._template, entry.fixed, f"{spec.name}: {role}")
            for role, entry in entries.items()
            if entry.fixed is not None
        }
        self._buffered = {
            role: bytearray()
            for role, entry in entries.items()
            if entry.fixed is None and (entry.inline or entry.stored.spread is not None)
        }
        self._current = plan

    def write(self, role: str, data: Buffer) -> None:
        """Append to a part; small parts and zero points are buffered until ``end``."""
        chunk = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        position = self._order.write(role, chunk.nbytes)
        assert self._current is not None
        plan = self._current
        entry = self._current.entry(role)
        if role in self._buffered:
            self._buffered[role] += chunk
        elif role in self._fixed:
            self._require_same(role, position, chunk)
        else:
            self._put(plan, entry, position, chunk)
            self._digests[role].update(chunk)
        if chunk.nbytes:
            self._last[role] = chunk[-1]

    def end(self) -> dict[str, Any]:
        """Close the tensor; return a record of the offsets of its blobs and of its numbers in the program."""
        name = self._order.end().name
        plan = self._current
        assert plan is not None
        digests = [self._complete(plan, entry) for entry in plan.entries]
        self._finish_tensor(plan)
        state = self._layout.files[plan.file] if plan.file else None
        return {
            "name": name,
            "blobs": [
                [self._path(plan.file), entry.offset + METADATA, entry.nbytes, digest]
                for entry, digest in zip(plan.entries, digests, strict=True)
                if entry.offset is not None
            ],
            "offsets": [entry.offset for entry in plan.entries],
            "inline": [entry.data.hex() for entry in plan.entries],
            "end": [state.end, state.count] if state else [],
        }

    def restore(self, record: Mapping[str, Any]) -> None:
        """Accept a tensor that an earlier run wrote with the same specs."""
        plan = self._layout.plan(self._order.expect(record["name"]))
        self._copy_left(*plan.site.first_offset)
        if len(record["offsets"]) != len(plan.entries):
            raise IntegrityError(
                "writer.record",
                "the earlier run used other offsets in the file: start again without resuming",
                where=record["name"],
            )
        for entry, offset, data in zip(plan.entries, record["offsets"], record["inline"], strict=True):
            entry.offset, entry.data = offset, bytes.fromhex(data)
            if offset is not None:
                self._describe(plan, entry)  # the record covers only the numbers
        if plan.file:
            state = self._layout.files[plan.file]
            state.end, state.count = record["end"]
        self._layout.remember(plan)
        self._order.restored(plan.spec.name)
        self._finish_tensor(plan)

    def finish(self) -> list[str]:
        """Complete the weight files, write the program and all other files, and return their names.

        The written package is parsed again without reading weights. If it cannot be opened, or contains other tensors,
        ``IntegrityError`` ``coreml.self-check`` is raised.
        """
        self._order.finish()
        self._copy_left()
        for name, state in self._layout.files.items():
            sink = self._sink(name)
            sink.write_at(0, header(state.count))
            sink.truncate(state.end)
        model = patch_model(self._layout, self._plans)
        template = self._template
        files = {path: bytes(template[path].view()) for path in (MANIFEST, *template.other_files)}
        files[template.package.model] = model
        self._self_check(files)
        for path, data in files.items():
            sink = self._target.create(path)
            sink.write_at(0, data)
            sink.truncate(len(data))
            sink.close()
        self.abort()
        return [*files, *(self._path(name) for name in self._layout.files)]

    def abort(self) -> None:
        """Close all files in their current state."""
        for sink in self._sinks.values():
            sink.close()
        self._sinks = {}

    def _self_check(self, files: Mapping[str, bytes]) -> None:
        parts = {path: Part("u8", len(data), MemorySource(data, path)) for path, data in files.items()}
        for name, state in self._layout.files.items():
            path = self._path(name)
            parts[path] = Part("u8", state.end, SinkSource(self._sink(name), state.end, path))
        written = Template(parts)
        written_sites = {site.name: (site.shape, site.dtype, site.layout.codec) for site in written.sites}
        before = {site.name: (site.shape, site.dtype, site.layout.codec) for site in self._template.sites}
        expected = before | {spec.name: (spec.shape, spec.dtype, spec.codec) for spec in self._specs}
        if written_sites != expected:
            different = min(name for name, _ in written_sites.items() ^ expected.items())
            raise IntegrityError(
                "coreml.self-check",
                f"expected to write {expected.get(different)}, found {written_sites.get(different)}",
                where=different,
            )

    def _complete(self, plan: TensorPlan, entry: Entry) -> str:
        """Write the missing data of an array: buffered and constant numbers, and metadata; return the CRC-32C."""
        stored = entry.stored
        location = f"{plan.spec.name}: {entry.stored.key}"
        if entry.fixed is not None:
            return ""
        spare = -stored.count * stored.type.bits % 8
        if entry.copied is not None:
            assert entry.offset is not None
            blob, raw = entry.copied
            return self._copy(plan.file, blob.offset, entry.offset, blob.length, raw)
        if stored.role and stored.role not in self._buffered:
            check_last_byte(self._last[stored.role], spare, location)
            digest = self._digests[stored.role].text()
        else:
            data = stored.to_stored(bytes(self._buffered[stored.role]), location) if stored.role else stored.constant
            if data:
                check_last_byte(data[-1], spare, location)
            if entry.offset is None:
                entry.data = data
                return ""
            self._put(plan, entry, 0, memoryview(data))
            digest = checksums.digest("crc32c", data)
        self._describe(plan, entry)
        return digest

    def _describe(self, plan: TensorPlan, entry: Entry) -> None:
        """Write the metadata of an entry's blob."""
        assert entry.offset is not None
        if entry.copied is not None:
            data = relocate_metadata(entry.copied[1], entry.offset)
        else:
            data = metadata(entry.offset, entry.stored.type, entry.stored.count)
        self._sink(plan.file).write_at(entry.offset, data)

    def _require_same(self, role: str, start: int, chunk: memoryview) -> None:
        """Raise ``UnsupportedError`` if bytes of a part that must not change differ from those that the program
        computes.
        """
        expected = bytearray(chunk.nbytes)
        self._fixed[role].readinto(start, memoryview(expected))
        if expected != chunk:
            raise UnsupportedError(
                "the program computes these numbers from constants that stay unchanged, but the tensor has other "
                "numbers; "
                "write into a program that stores the constant directly",
                rule="coreml.tensor",
                where=self._fixed[role].where,
            )

    def _put(self, plan: TensorPlan, entry: Entry, start: int, chunk: memoryview) -> None:
        """Write the next bytes of an array.

        If the array uses another array's offset, the bytes are only compared. If they differ, the array gets a separate
        offset.
        """
        assert entry.offset is not None
        sink = self._sink(plan.file)
        position = entry.offset + METADATA
        if entry.reused:
            if _same(sink, position + start, chunk):
                return
            self._layout.part(plan, entry)
            new_position = entry.offset + METADATA
            for position_in_data in range(0, start, CHUNK):
                copied = bytearray(min(CHUNK, start - position_in_data))
                sink.readinto(position + position_in_data, memoryview(copied))
                sink.write_at(new_position + position_in_data, copied)
            position = new_position
        sink.write_at(position + start, chunk)

    def _copy_left(self, file: str | None = None, before: int = 0) -> None:
        for item in self._layout.place_other_blobs(file, before):
            self._copy(item.file, item.blob.offset, item.new, item.blob.length, item.raw)

    def _copy(self, file: str, start: int, offset: int, length: int, raw: bytes) -> str:
        """Copy a blob of the template; return the CRC-32C of its data."""
        source = self._template.weights.files[file].source
        sink = self._sink(file)
        sink.write_at(offset, relocate_metadata(raw, offset))
        running = checksums.hasher("crc32c")
        for copied in range(0, length, CHUNK):
            chunk = bytearray(min(CHUNK, length - copied))
            source.readinto(start + copied, memoryview(chunk))
            sink.write_at(offset + METADATA + copied, chunk)
            running.update(chunk)
        return running.text()

    def _path(self, file: str) -> str:
        return self._template.package.weight_file(file, "")

    def _sink(self, file: str) -> Sink:
        if file not in self._sinks:
            self._sinks[file] = self._target.create(self._path(file))
        return self._sinks[file]

    def _finish_tensor(self, plan: TensorPlan) -> None:
        self._plans.append(plan)
        self._current = None


def _same(sink: Sink, offset: int, chunk: memoryview) -> bool:
    for start in range(0, chunk.nbytes, CHUNK):
        written = bytearray(min(CHUNK, chunk.nbytes - start))
        sink.readinto(offset + start, memoryview(written))
        if written != chunk[start : start + len(written)]:
            return False
    return True


class SinkSource:
    """The written bytes of a sink as a byte source, which does not close the sink."""

    mapped = False

    def __init__(self, sink: Sink, size: int, name: str) -> None:
        self._sink = sink
        self.size = size
        self.name = name

    def view(self, offset: int, length: int) -> memoryview:
        out = bytearray(length)
        self.readinto(offset, memoryview(out))
        return memoryview(out)

    def readinto(self, offset: int, out: memoryview) -> None:
        self._sink.readinto(offset, out)

    def changed(self) -> bool:
        return False

    def close(self) -> None:
        """Do nothing: the writer owns the sink."""
