"""A program with other constants: new operations in place of old ones, other offsets, every other byte as it was."""

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

# Attributes that belong to the operation that is replaced; any other (its name, say) goes to the new one.
_OWN = {"val", "quantized_data", "zero_point", "scale", "axis", "indices", "lut", "shape", "nonzero_data", "mask"}
_OWN |= {"source_val", "output_dtype"}


def patched(layout: Layout, plans: Sequence[TensorPlan]) -> bytes:
    """Return the model's bytes for tensors that were laid out."""
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
            _point(edits, value, layout.left[value.blob.file, value.blob.offset].new)
    return edits.apply()


def _keep(edits: Edits, plan: TensorPlan) -> None:
    for entry in plan.entries:
        for value in entry.values:
            if entry.offset is not None:
                _point(edits, value, entry.offset)
            elif entry.data != value.bytes():
                new = encode_immediate(entry.stored.type, entry.stored.dims, entry.data)
                edits.replace(value.node, value.node.start, value.node.end, new)


def _point(edits: Edits, value: Value, offset: int) -> None:
    """Let a value be the blob with metadata at ``offset``."""
    ref = value.blob
    assert ref is not None
    if ref.offset == offset:
        return
    start, end = (ref.field.tag, ref.field.end) if ref.field else (ref.node.end, ref.node.end)
    edits.replace(ref.node, start, end, encode_offset(offset))


def _replace(edits: Edits, plan: TensorPlan, names: set[str]) -> None:
    """Put new operations where the last of the old ones stands; the others go."""
    old = plan.site.last
    for operation in plan.site.operations[:-1]:
        edits.replace(operation.block, operation.node.tag, operation.node.end, b"")
    outputs = [
        [fresh(f"{old.outputs[0].name}_{index}_{at}", names) for at in range(len(planned.outputs))]
        for index, planned in enumerate(plan.operations[:-1])
    ]
    made = []
    for index, planned in enumerate(plan.operations):
        last = index == len(plan.operations) - 1
        rest = _rest(old) if last else _outputs(outputs[index], planned.outputs)
        body = bytes_field(TYPE, planned.type) + _params(plan, index, outputs) + rest
        made.append(bytes_field(OPERATIONS, body))
    edits.replace(old.block, old.node.tag, old.node.end, b"".join(made))


def _params(plan: TensorPlan, index: int, outputs: Sequence[Sequence[str]]) -> bytes:
    """Return the parameters of a new operation: attributes, or inputs that are values or names."""
    planned = plan.operations[index]
    values = [(item.key, _value(plan, _of(plan, (index, item.key)))) for item in planned.stored]
    values += [(key, _value(plan, _of(plan, (at, other)))) for key, at, other in planned.again]
    if planned.attributes:
        return b"".join(map_entry(ATTRIBUTES, key, value) for key, value in values)
    bindings = [(key, bytes_field(2, value)) for key, value in values]
    bindings += [(key, bytes_field(1, outputs[at][output])) for key, at, output in planned.bound]
    return b"".join(map_entry(INPUTS, key, bytes_field(1, binding)) for key, binding in bindings)


def _of(plan: TensorPlan, key: tuple[int, str]) -> Entry:
    return next(entry for entry in plan.entries if entry.key == key)


def _value(plan: TensorPlan, entry: Entry) -> bytes:
    stored = entry.stored
    if entry.offset is None:
        return encode_immediate(stored.type, stored.dims, entry.data)
    return encode_blob(stored.type, stored.dims, plan.file, entry.offset)


def _rest(old: Operation) -> bytes:
    """Return what a new operation takes over, as it is: outputs, other attributes, fields that Ingot does not know."""
    data = old.node.data
    return b"".join(
        data[field.tag : field.end]
        for field, key in old.fields
        if field.number not in (TYPE, INPUTS) and not (field.number == ATTRIBUTES and key in _OWN)
    )


def _outputs(names: Sequence[str], types: Sequence[tuple[MilType, tuple[int, ...]]]) -> bytes:
    """Return the outputs and the name of an operation that feeds another."""
    made = b"".join(
        bytes_field(OUTPUTS, bytes_field(1, name) + bytes_field(2, encode_type(type, dims)))
        for name, (type, dims) in zip(names, types, strict=True)
    )
    return made + map_entry(ATTRIBUTES, "name", encode_text(names[0]))


def fresh(wanted: str, names: set[str]) -> str:
    """Return a name that is not among ``names``, and add it."""
    name, number = wanted, 1
    while name in names:
        name, number = f"{wanted}_{number}", number + 1
    names.add(name)
    return name
