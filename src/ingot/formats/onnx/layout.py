"""The offsets in a model to write, and the graph around its constants; they follow from the specs.

Constants of the model's file, and of separate files, stay there. If the model would exceed the limit of protocol
buffers, large constants are moved to a separate file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ingot.core.parsing.wire import BYTES, Edits, Hole, Node, Segment, bytes_field, length, message_field, number_field
from ingot.errors import UnsupportedError, UsageError
from ingot.formats.onnx.carry import Planned, names_of, plan_tensor
from ingot.formats.onnx.forms import NewConstant, operator
from ingot.formats.onnx.graph import (
    ATTRIBUTES,
    DOMAIN,
    INITIALIZERS,
    INPUTS,
    MICROSOFT,
    NODE_NAME,
    NODES,
    OP_TYPE,
    OPSETS,
    OUTPUTS,
    Graph,
    Operator,
)
from ingot.formats.onnx.sites import NBITS, LeftError
from ingot.formats.onnx.slots import Conversion
from ingot.formats.onnx.template import MAX_MODEL, Template
from ingot.formats.onnx.tensors import (
    EXTERNAL,
    LOCATION,
    RAW,
    Constant,
    External,
    encode_constant,
    encode_external_constant,
    external_fields,
)
from ingot.model.spec import TensorSpec

SUFFIX = ".data"
_OUTSIDE_FROM = 1024  # minimum bytes of a constant in a separate file
# onnxruntime maps constants of at least a megabyte
_LARGE = 1 << 20
_ALIGN_LARGE = 1 << 16
_ALIGN = 64
_SEMANTIC_FIELDS = frozenset((INPUTS, OUTPUTS, NODE_NAME, OP_TYPE, ATTRIBUTES, DOMAIN))
_IDENTITY = ("", "Identity")
_MATMUL = ("", "MatMul")
_ADD = ("", "Add")
_BIAS = 5


@dataclass(slots=True)
class Entry:
    """A constant of the model to write, and its location.

    ``name`` is the constant's name in the graph. ``existing`` is set for an unchanged constant, ``new`` for a new one.
    ``external`` is the constant's location in a separate file. ``offset`` is the offset in the model file. Both are
    None if the constant stays unchanged in the field of its type. If ``computed`` is true, the model computes the
    values, and the writer only compares them. ``first`` is the entry of another tensor with the same constant, which is
    written only once.
    """

    name: str
    role: str
    nbytes: int
    conversion: Conversion | None
    new: NewConstant | None = None
    existing: Constant | None = None
    external: External | None = None
    offset: int | None = None
    computed: bool = False
    first: Entry | None = None

    @property
    def outside(self) -> bool:
        """Whether the existing constant was in a separate file."""
        return self.existing is not None and self.existing.external is not None


@dataclass(slots=True)
class TensorPlan:
    """The plan for writing a tensor, with an entry for each constant that it needs."""

    planned: Planned
    entries: list[Entry]

    def entry(self, role: str) -> Entry:
        """Return the entry of the part ``role``."""
        return next(entry for entry in self.entries if entry.role == role)


class Layout:
    """The layout of the model and its separate files.

    Parameters
    ----------
    template : Template
    name : str
        Name of the model to be written.
    specs : sequence of TensorSpec
        Each tensor of the graph once.
    siblings : bool
        Whether separate files may be written.

    Raises
    ------
    UnsupportedError
        ``onnx.tensors``: not the tensors of the graph; ``onnx.unsupported``: a tensor that the graph cannot contain in
        this storage; ``onnx.too-large``.
    """

    def __init__(self, template: Template, name: str, specs: Sequence[TensorSpec], *, siblings: bool) -> None:
        self.template = template
        self.name = name
        self.plans = {plan.planned.spec.name: plan for plan in self._plans(specs)}
        self._share()
        self._outside = siblings and bool(template.externals)
        self._lay_out(self._stays_outside)
        if self.size > MAX_MODEL and siblings:
            self._lay_out(lambda entry: entry.nbytes >= _OUTSIDE_FROM)
        if self.size > MAX_MODEL:
            raise UnsupportedError(
                f"expected a model of at most {MAX_MODEL} bytes, the limit of protocol buffers, found {self.size}: "
                "write "
                "into a folder, in which weights can be in separate files",
                rule="onnx.too-large",
                where=name,
            )

    def _plans(self, specs: Sequence[TensorSpec]) -> Iterator[TensorPlan]:
        model = self.template.model
        sites = self.template.sites
        named = names_of(model, sites)
        remaining = {site.name for site in sites}
        for spec in specs:
            named_tensor = named.get(spec.name)
            if named_tensor is None or named_tensor.site.name not in remaining:
                raise UnsupportedError(
                    "expected each tensor of the graph exactly once, found an extra tensor",
                    rule="onnx.tensors",
                    where=spec.name,
                )
            remaining.remove(named_tensor.site.name)
            try:
                planned = plan_tensor(model, named_tensor, spec)
            except LeftError as reason:
                raise UnsupportedError(str(reason), rule="onnx.unsupported", where=spec.name) from None
            yield TensorPlan(planned, list(_entries(planned, self.template)))
        if remaining:
            raise UnsupportedError(
                "expected each tensor of the graph exactly once, but this tensor is missing",
                rule="onnx.tensors",
                where=min(remaining),
            )

    def _share(self) -> None:
        """Set ``Entry.first`` if several tensors have the same constant, so that it is written once."""
        first: dict[int, Entry] = {}
        for plan in self.plans.values():
            for entry in plan.entries:
                if entry.existing is not None:
                    shared = first.setdefault(id(entry.existing), entry)
                    entry.first = None if shared is entry else shared

    def _stays_outside(self, entry: Entry) -> bool:
        if not self._outside:
            return False
        return entry.outside or (entry.existing is None and entry.nbytes >= _OUTSIDE_FROM)

    def _lay_out(self, outside: Callable[[Entry], bool]) -> None:
        self.ends: dict[str, int] = {}
        all_entries = [entry for plan in self.plans.values() for entry in plan.entries if not entry.computed]
        entries = [entry for entry in all_entries if entry.first is None]
        external_entries = [entry for entry in entries if outside(entry)]
        for entry in entries:
            entry.external = entry.offset = None
        self._assign_external(external_entries)
        self._holes: dict[str, Entry] = {}
        self.segments = self._graph()
        position = 0
        for segment in self.segments:
            if isinstance(segment, Hole):
                self._holes[segment.name].offset = position
            position += length((segment,))
        self.size = position
        for entry in all_entries:
            if entry.first is not None:
                entry.external, entry.offset = entry.first.external, entry.first.offset

    def _assign_external(self, external_entries: Sequence[Entry]) -> None:
        """Assign offsets in separate files; if every constant is unchanged, the previous offsets are used again."""
        previous = [
            entry.existing.external
            for entry in external_entries
            if entry.existing is not None and entry.existing.external is not None
        ]
        locations = [
            External(location.location, location.offset, entry.nbytes)
            for location, entry in zip(previous, external_entries, strict=False)
        ]
        if len(previous) == len(external_entries) and _are_disjoint(locations):
            for entry, location in zip(external_entries, locations, strict=True):
                entry.external = location
        else:
            files = list(self.template.externals)
            file = files[0] if len(files) == 1 else self.name.rpartition("/")[2] + SUFFIX
            end = 0
            for entry in external_entries:
                align = _ALIGN_LARGE if entry.nbytes >= _LARGE else _ALIGN
                offset = -(-end // align) * align
                entry.external, end = External(file, offset, entry.nbytes), offset + entry.nbytes
        for entry in external_entries:
            assert entry.external is not None
            if entry.external.location == self.name:
                raise UsageError(
                    f"expected another name for the model than {self.name!r}, the name of the file of its weights",
                    rule="onnx.external-path",
                )
            end = entry.external.offset + entry.nbytes
            self.ends[entry.external.location] = max(self.ends.get(entry.external.location, 0), end)

    def _hole(self, entry: Entry) -> Hole:
        name = str(len(self._holes))
        self._holes[name] = entry
        return Hole(name, entry.nbytes)

    def _graph(self) -> list[Segment]:
        model = self.template.model
        edits = Edits(self.template.model.root)
        still_used = self._still_used()
        removed = set[int]()
        added: dict[int, tuple[Graph, list[bytes]]] = {}
        for plan in self.plans.values():
            if plan.planned.storage is None:
                for entry in plan.entries:
                    if not entry.computed and entry.first is None:
                        self._keep(edits, entry)
            else:
                graph = plan.planned.site.graph
                new = self._replace(edits, plan, still_used, removed)
                added.setdefault(id(graph), (graph, []))[1].extend(new)
        for graph, operators in added.values():
            message = graph.message
            first = next((item.tag for item in message.fields() if item.number == NODES), message.end)
            if operators:
                edits.replace(message, first, first, _nodes(operators))
        packs = any(
            plan.planned.storage is not None and plan.planned.storage.key == NBITS for plan in self.plans.values()
        )
        if packs and MICROSOFT not in model.opsets:
            opset = bytes_field(OPSETS, bytes_field(1, MICROSOFT) + number_field(2, 1))
            edits.replace(model.root, model.root.end, model.root.end, opset)
        return edits.segments()

    def _still_used(self) -> set[int]:
        """Return the ``id`` of each constant that is used by an operator that stays in the graph."""
        replaced = {
            id(operator)
            for plan in self.plans.values()
            if plan.planned.storage is not None
            for operator in plan.planned.site.operators
        }
        return {
            id(graph.constants[name])
            for graph in self.template.model.graphs
            for name, users in graph.uses.items()
            if name in graph.constants and any(id(user) not in replaced for user, _ in users)
        }

    def _keep(self, edits: Edits, entry: Entry) -> None:
        """Keep a constant at its position in the graph, and replace its numbers and their location."""
        constant = entry.existing
        assert constant is not None
        message = constant.message
        if entry.external is None and constant.external is None:
            if constant.raw is not None:
                edits.replace(message, *constant.raw, [self._hole(entry)])
            return
        previous = constant.external
        if previous is not None and entry.external == External(previous.location, previous.offset, constant.nbytes):
            return
        replaced_fields = (RAW, EXTERNAL, LOCATION, constant.type.field)
        for item in message.fields():
            if item.number in replaced_fields:
                edits.replace(message, item.tag, item.end, b"")
        new: list[Segment] = message_field(RAW, [self._hole(entry)]) if entry.external is None else []
        if entry.external is not None:
            new.append(external_fields(entry.external))
        edits.replace(message, message.end, message.end, new)

    def _replace(self, edits: Edits, plan: TensorPlan, still_used: set[int], removed: set[int]) -> list[bytes]:
        """Replace a tensor's old constants by new ones in ``edits``.

        Returns the encoded new operators, which precede all others.
        """
        planned = plan.planned
        site = planned.site
        storage = planned.storage
        assert storage is not None
        fields: list[Segment] = []
        for entry in plan.entries:
            assert entry.new is not None
            type = entry.new.type
            dims = entry.new.dims
            if entry.external is not None:
                body: list[Segment] = [encode_external_constant(entry.name, type, dims, entry.external)]
            else:
                body = encode_constant(entry.name, type, dims, self._hole(entry))
            fields += message_field(INITIALIZERS, body)
        for index, slot in enumerate(site.slots.values()):
            message = slot.constant.message
            key = id(slot.constant)
            is_replaced = index == 0 or (key not in still_used and key not in removed)
            removed.add(key)
            if is_replaced:
                _replace_message(edits, message, fields if index == 0 else b"")
        names = [entry.name for entry in plan.entries]
        if planned.transposed:
            for item in site.operators if site.transposed else site.matmuls:
                new = self._multiplied(item, names, site.transposed, storage.attributes)
                _replace_message(edits, item.message, _nodes(new))
            if not site.transposed:
                for item in site.operators:
                    _replace_message(edits, item.message, b"")
            return []
        return self._dense_or_dequantized(edits, plan, names)

    def _dense_or_dequantized(self, edits: Edits, plan: TensorPlan, names: list[str]) -> list[bytes]:
        site = plan.planned.site
        storage = plan.planned.storage
        local = plan.planned.local
        assert storage is not None
        added = []
        if storage.key is not None:
            added.append(operator(storage.key, f"{local}_DequantizeLinear", names, [local], storage.attributes))
        if site.transposed:
            for item in site.operators:
                _replace_message(edits, item.message, _nodes(self._multiplied_dense(item, local)))
            return added
        for index, item in enumerate(site.operators):
            _replace_message(edits, item.message, b"")
            if index:
                added.append(operator(_IDENTITY, item.name, [local], item.outputs))
        return added

    def _multiplied(
        self, item: Operator, names: list[str], packed: bool, attributes: Sequence[tuple[str, int]]
    ) -> list[bytes]:
        """Return the encoded MatMulNBits that replaces ``item`` and multiplies by the codes ``names``.

        ``item`` is a MatMul or, if ``packed`` is set, a MatMulNBits with other codes.
        """
        inputs = [item.input(0), *names]
        if packed:
            accuracy = item.integer("accuracy_level", 0)
            attributes = [*attributes, *((("accuracy_level", accuracy),) if accuracy else ())]
            if item.input(_BIAS):
                inputs += [""] * (_BIAS - len(inputs)) + [item.input(_BIAS)]
        return [operator(NBITS, item.name, inputs, item.outputs, attributes, _annotations(item))]

    def _multiplied_dense(self, item: Operator, name: str) -> list[bytes]:
        """Return the encoded MatMul of a dense matrix that replaces the MatMulNBits ``item``.

        If ``item`` has a bias, an Add with the bias follows.
        """
        bias = item.input(_BIAS)
        if not bias:
            return [operator(_MATMUL, item.name, [item.input(0), name], item.outputs, (), _annotations(item))]
        product = _free(f"{item.outputs[0]}_product", self.template)
        return [
            operator(_MATMUL, item.name, [item.input(0), name], [product], (), _annotations(item)),
            operator(_ADD, f"{item.name}_bias", [product, bias], item.outputs),
        ]


def _are_disjoint(locations: Sequence[External]) -> bool:
    """Return whether every two locations are equal or disjoint."""
    spans = sorted(
        {(location.location, location.offset, location.offset + (location.length or 0)) for location in locations}
    )
    return all(earlier[0] != later[0] or earlier[2] <= later[1] for earlier, later in pairwise(spans))


def _replace_message(edits: Edits, message: Node, new: bytes | Sequence[Segment]) -> None:
    """Replace the message of a node or an initializer, with its tag, by the encoded fields ``new``."""
    parent = message.parent
    assert parent is not None
    edits.replace(parent, message.tag, message.end, new)


def _nodes(operators: Sequence[bytes]) -> bytes:
    """Return operators as encoded fields of a graph."""
    return b"".join(bytes_field(NODES, item) for item in operators)


def _annotations(item: Operator) -> bytes:
    """Return the encoded fields of an operator that do not affect the computation: documentation and metadata."""
    message = item.message
    return b"".join(
        bytes(message.data[field.tag : field.end])
        for field in message.fields()
        if field.number not in _SEMANTIC_FIELDS and field.wire_type == BYTES
    )


def _free(name: str, template: Template) -> str:
    """Return a name, based on ``name``, that the model does not use."""
    while name in template.model.names:
        name += "_"
    return name


def _entries(planned: Planned, template: Template) -> Iterator[Entry]:
    if planned.storage is None:
        for role, slot in planned.site.slots.items():
            if slot.values is not None:
                yield Entry(planned.local, role, slot.length, None, computed=True)
                continue
            constant = slot.constant
            yield Entry(constant.name, role, constant.nbytes, slot.conversion, existing=constant)
        return
    for numbers in planned.storage.numbers:
        name = _free(planned.local + numbers.suffix, template) if numbers.suffix else planned.local
        yield Entry(name, numbers.role, numbers.nbytes, numbers.conversion, numbers)
