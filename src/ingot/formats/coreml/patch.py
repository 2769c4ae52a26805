"""A program with other constants: new operations replace old ones, offsets are updated, all other bytes stay
unchanged."""

from __future__ import annotations

from collections.abc import Sequence

from ingot.core.parsing.wire import Edits, bytes_field, map_entry
from ingot.formats.coreml.layout import Entry, Layout, TensorPlan
from ingot.formats.coreml.mil import ATTRIBUTES, INPUTS, OPERATIONS, OUTPUTS, TYPE, Operation
from ingot.formats.coreml.types import MilType
from ingot.formats.coreml.values import (
    Value,
    encode_blob,
    encode_immediate,
    encode_offset,
    encode_text,
    encode_type,
)

# Attributes of the replaced operation that are dropped; any other (its name, say) is copied to the new operation.
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
    """Return the model's bytes for tensors whose offsets are assigned."""
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
    """Make a value refer to the blob with metadata at ``offset``."""
    ref = value.blob
    assert ref is not None
    if ref.offset == offset:
        return
    start, end = (ref.field.tag, ref.field.end) if ref.field else (ref.node.end, ref.node.end)
    edits.replace(ref.node, start, end, encode_offset(offset))


def _replace(edits: Edits, plan: TensorPlan, names: set[str]) -> None:
    """Replace the last of the old operations by new ones, and remove the others."""
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
    """Return the parameters of a new operation: attributes, or inputs that are values or names."""
    planned = plan.operations[index]
    values = [(item.key, _value(plan, _entry_of(plan, (index, item.key)))) for item in planned.stored]
    values += [
        (key, _value(plan, _entry_of(plan, (operation_index, other)))) for key, operation_index, other in planned.again
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
    """Return the fields that a new operation copies unchanged: outputs, other attributes, unknown fields."""
    data = old.node.data
    return b"".join(
        data[field.tag : field.end]
        for field, key in old.fields
        if field.number not in (TYPE, INPUTS) and not (field.number == ATTRIBUTES and key in _DROPPED_ATTRIBUTES)
    )


def _outputs(names: Sequence[str], types: Sequence[tuple[MilType, tuple[int, ...]]]) -> bytes:
    """Return the outputs and the name of an operation that feeds another."""
    encoded = b"".join(
        bytes_field(OUTPUTS, bytes_field(1, name) + bytes_field(2, encode_type(type, dims)))
        for name, (type, dims) in zip(names, types, strict=True)
    )
    return encoded + map_entry(ATTRIBUTES, "name", encode_text(names[0]))


def unique_name(base: str, names: set[str]) -> str:
    """Return a name that is not among ``names``, and add it."""
    name, number = base, 1
    while name in names:
        name, number = f"{base}_{number}", number + 1
    names.add(name)
    return name
