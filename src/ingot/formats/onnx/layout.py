"""Where everything lies in a model to be written, and the graph around it; decided by the specs alone.

Numbers that lay in the model's file stay there, those that lay beside it lie beside it again. What would make the model
larger than protocol buffers read goes to a file beside it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ingot.core.parsing.wire import BYTES, Edits, Hole, Node, Piece, bytes_field, length, message_field, number_field
from ingot.errors import UnsupportedError, UsageError
from ingot.formats.onnx.carry import Planned, names_of, plan_tensor
from ingot.formats.onnx.forms import Numbers, operator
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
    encoded,
    encoded_external,
    external_fields,
)
from ingot.model.spec import TensorSpec

SUFFIX = ".data"
_OUTSIDE_FROM = 1024  # bytes of a constant that is worth a place in another file
_LARGE, _ALIGN_LARGE, _ALIGN = 1 << 20, 1 << 16, 64  # onnxruntime maps constants of a megabyte
_OWN = frozenset((INPUTS, OUTPUTS, NODE_NAME, OP_TYPE, ATTRIBUTES, DOMAIN))
_IDENTITY, _MATMUL, _ADD = ("", "Identity"), ("", "MatMul"), ("", "Add")
_BIAS = 5


@dataclass(slots=True)
class Entry:
    """One constant to be written: of a kept one ``kept``, of a new one ``numbers``; ``name`` is its name in the graph.

    ``place`` is where it lies in a file beside the model, ``offset`` where in the model itself; neither where it stays
    in the field of its type, untouched. ``computed`` tells that it is no constant: the model computes it, and it is
    compared alone. ``first`` is the entry of another tensor with the same constant, which is written once.
    """

    name: str
    role: str
    nbytes: int
    conversion: Conversion | None
    numbers: Numbers | None = None
    kept: Constant | None = None
    place: External | None = None
    offset: int | None = None
    computed: bool = False
    first: Entry | None = None

    @property
    def outside(self) -> bool:
        """Whether it lay beside the model."""
        return self.kept is not None and self.kept.external is not None


@dataclass(slots=True)
class TensorPlan:
    """How one tensor is written: which constants it takes."""

    planned: Planned
    entries: list[Entry]

    def entry(self, role: str) -> Entry:
        """Return the entry of a part."""
        return next(entry for entry in self.entries if entry.role == role)


class Layout:
    """The model and the files beside it.

    Parameters
    ----------
    template : Template
    name : str
        Of the model to be written.
    specs : sequence of TensorSpec
        Each tensor of the graph once.
    beside : bool
        Whether files beside the model may be written.

    Raises
    ------
    UnsupportedError
        ``onnx.tensors``: not the tensors of the graph; ``onnx.unsupported``: one that the graph cannot have so;
        ``onnx.too-large``.
    """

    def __init__(self, template: Template, name: str, specs: Sequence[TensorSpec], *, beside: bool) -> None:
        self.template, self.name = template, name
        self.plans = {plan.planned.spec.name: plan for plan in self._plans(specs)}
        self._share()
        self._outside = beside and bool(template.externals)
        self._lay_out(self._stays_outside)
        if self.size > MAX_MODEL and beside:
            self._lay_out(lambda entry: entry.nbytes >= _OUTSIDE_FROM)
        if self.size > MAX_MODEL:
            raise UnsupportedError(
                f"expected a model of at most {MAX_MODEL} bytes, as protocol buffers have it, found {self.size}: write "
                "into a folder, where weights lie beside the model",
                rule="onnx.too-large",
                where=name,
            )

    def _plans(self, specs: Sequence[TensorSpec]) -> Iterator[TensorPlan]:
        model, sites = self.template.model, self.template.sites
        named, left = names_of(model, sites), {site.name for site in sites}
        for spec in specs:
            found = named.get(spec.name)
            if found is None or found.site.name not in left:
                raise UnsupportedError(
                    "expected each tensor of the graph once, and no other, found one more",
                    rule="onnx.tensors",
                    where=spec.name,
                )
            left.remove(found.site.name)
            try:
                planned = plan_tensor(model, found, spec)
            except LeftError as reason:
                raise UnsupportedError(str(reason), rule="onnx.unsupported", where=spec.name) from None
            yield TensorPlan(planned, list(_entries(planned, self.template)))
        if left:
            raise UnsupportedError(
                "expected each tensor of the graph once, found none of this name",
                rule="onnx.tensors",
                where=min(left),
            )

    def _share(self) -> None:
        """Let tensors that have a constant in common, such as a scale, write it once."""
        first: dict[int, Entry] = {}
        for plan in self.plans.values():
            for entry in plan.entries:
                if entry.kept is not None:
                    other = first.setdefault(id(entry.kept), entry)
                    entry.first = None if other is entry else other

    def _stays_outside(self, entry: Entry) -> bool:
        if not self._outside:
            return False
        return entry.outside or (entry.kept is None and entry.nbytes >= _OUTSIDE_FROM)

    def _lay_out(self, outside: Callable[[Entry], bool]) -> None:
        self.ends: dict[str, int] = {}
        every = [entry for plan in self.plans.values() for entry in plan.entries if not entry.computed]
        entries = [entry for entry in every if entry.first is None]
        away = [entry for entry in entries if outside(entry)]
        for entry in entries:
            entry.place = entry.offset = None
        self._place(away)
        self._holes: dict[str, Entry] = {}
        self.pieces = self._graph()
        position = 0
        for piece in self.pieces:
            if isinstance(piece, Hole):
                self._holes[piece.name].offset = position
            position += length((piece,))
        self.size = position
        for entry in every:
            if entry.first is not None:
                entry.place, entry.offset = entry.first.place, entry.first.offset

    def _place(self, away: Sequence[Entry]) -> None:
        """Give constants their places beside the model: those that they had where all of them are kept."""
        had = [entry.kept.external for entry in away if entry.kept is not None and entry.kept.external is not None]
        places = [External(place.location, place.offset, entry.nbytes) for place, entry in zip(had, away, strict=False)]
        if len(had) == len(away) and _apart(places):
            for entry, place in zip(away, places, strict=True):
                entry.place = place
        else:
            files = list(self.template.externals)
            location, end = files[0] if len(files) == 1 else self.name.rpartition("/")[2] + SUFFIX, 0
            for entry in away:
                align = _ALIGN_LARGE if entry.nbytes >= _LARGE else _ALIGN
                offset = -(-end // align) * align
                entry.place, end = External(location, offset, entry.nbytes), offset + entry.nbytes
        for entry in away:
            assert entry.place is not None
            if entry.place.location == self.name:
                raise UsageError(
                    f"expected another name for the model than {self.name!r}, which its weights have",
                    rule="onnx.external-path",
                )
            end = entry.place.offset + entry.nbytes
            self.ends[entry.place.location] = max(self.ends.get(entry.place.location, 0), end)

    def _hole(self, entry: Entry) -> Hole:
        name = str(len(self._holes))
        self._holes[name] = entry
        return Hole(name, entry.nbytes)

    def _graph(self) -> list[Piece]:
        model, edits = self.template.model, Edits(self.template.model.root)
        kept, removed = self._still_used(), set[int]()
        added: dict[int, tuple[Graph, list[bytes]]] = {}
        for plan in self.plans.values():
            if plan.planned.form is None:
                for entry in plan.entries:
                    if not entry.computed and entry.first is None:
                        self._keep(edits, entry)
            else:
                graph = plan.planned.site.graph
                new = self._replace(edits, plan, kept, removed)
                added.setdefault(id(graph), (graph, []))[1].extend(new)
        for graph, operators in added.values():
            message = graph.message
            first = next((item.tag for item in message.fields() if item.number == NODES), message.end)
            if operators:
                edits.replace(message, first, first, _nodes(operators))
        packs = any(plan.planned.form is not None and plan.planned.form.key == NBITS for plan in self.plans.values())
        if packs and MICROSOFT not in model.opsets:
            stated = bytes_field(OPSETS, bytes_field(1, MICROSOFT) + number_field(2, 1))
            edits.replace(model.root, model.root.end, model.root.end, stated)
        return edits.pieces()

    def _still_used(self) -> set[int]:
        """Return the constants, by ``id``, that operators take beside those that are replaced."""
        gone = {
            id(operator)
            for plan in self.plans.values()
            if plan.planned.form is not None
            for operator in plan.planned.site.operators
        }
        return {
            id(graph.constants[name])
            for graph in self.template.model.graphs
            for name, users in graph.uses.items()
            if name in graph.constants and any(id(user) not in gone for user, _ in users)
        }

    def _keep(self, edits: Edits, entry: Entry) -> None:
        """Leave a constant where it is, but for its numbers and where these lie."""
        constant = entry.kept
        assert constant is not None
        message = constant.message
        if entry.place is None and constant.external is None:
            if constant.raw is not None:
                edits.replace(message, *constant.raw, [self._hole(entry)])
            return
        place = constant.external
        if place is not None and entry.place == External(place.location, place.offset, constant.nbytes):
            return
        gone = (RAW, EXTERNAL, LOCATION, constant.type.field)
        for item in message.fields():
            if item.number in gone:
                edits.replace(message, item.tag, item.end, b"")
        new: list[Piece] = message_field(RAW, [self._hole(entry)]) if entry.place is None else []
        if entry.place is not None:
            new.append(external_fields(entry.place))
        edits.replace(message, message.end, message.end, new)

    def _replace(self, edits: Edits, plan: TensorPlan, kept: set[int], removed: set[int]) -> list[bytes]:
        """Put new constants in place of old ones, and return the operators to be added in front of all others."""
        planned = plan.planned
        site, form = planned.site, planned.form
        assert form is not None
        fields: list[Piece] = []
        for entry in plan.entries:
            assert entry.numbers is not None
            type, dims = entry.numbers.type, entry.numbers.dims
            if entry.place is not None:
                body: list[Piece] = [encoded_external(entry.name, type, dims, entry.place)]
            else:
                body = encoded(entry.name, type, dims, self._hole(entry))
            fields += message_field(INITIALIZERS, body)
        for index, slot in enumerate(site.slots.values()):
            message, key = slot.constant.message, id(slot.constant)
            goes = index == 0 or (key not in kept and key not in removed)
            removed.add(key)
            if goes:
                _swap(edits, message, fields if index == 0 else b"")
        names = [entry.name for entry in plan.entries]
        if planned.turned:
            for item in site.operators if site.turned else site.matmuls:
                new = self._multiplied(item, names, site.turned, form.attributes)
                _swap(edits, item.message, _nodes(new))
            if not site.turned:
                for item in site.operators:
                    _swap(edits, item.message, b"")
            return []
        return self._dense_or_dequantized(edits, plan, names)

    def _dense_or_dequantized(self, edits: Edits, plan: TensorPlan, names: list[str]) -> list[bytes]:
        site, form, local = plan.planned.site, plan.planned.form, plan.planned.local
        assert form is not None
        added = []
        if form.key is not None:
            added.append(operator(form.key, f"{local}_DequantizeLinear", names, [local], form.attributes))
        if site.turned:
            for item in site.operators:
                _swap(edits, item.message, _nodes(self._multiplied_dense(item, local)))
            return added
        for index, item in enumerate(site.operators):
            _swap(edits, item.message, b"")
            if index:
                added.append(operator(_IDENTITY, item.name, [local], item.outputs))
        return added

    def _multiplied(
        self, item: Operator, names: list[str], packed: bool, attributes: Sequence[tuple[str, int]]
    ) -> list[bytes]:
        """Return a MatMul, or a MatMulNBits of other codes, as MatMulNBits of these."""
        inputs = [item.input(0), *names]
        if packed:
            accuracy = item.integer("accuracy_level", 0)
            attributes = [*attributes, *((("accuracy_level", accuracy),) if accuracy else ())]
            if item.input(_BIAS):
                inputs += [""] * (_BIAS - len(inputs)) + [item.input(_BIAS)]
        return [operator(NBITS, item.name, inputs, item.outputs, attributes, _others(item))]

    def _multiplied_dense(self, item: Operator, name: str) -> list[bytes]:
        """Return a MatMulNBits as MatMul of a dense matrix, and a sum where it has a bias."""
        bias = item.input(_BIAS)
        if not bias:
            return [operator(_MATMUL, item.name, [item.input(0), name], item.outputs, (), _others(item))]
        product = _free(f"{item.outputs[0]}_product", self.template)
        return [
            operator(_MATMUL, item.name, [item.input(0), name], [product], (), _others(item)),
            operator(_ADD, f"{item.name}_bias", [product, bias], item.outputs),
        ]


def _apart(places: Sequence[External]) -> bool:
    """Whether of any two places both are the same or they share no byte."""
    spans = sorted({(place.location, place.offset, place.offset + (place.length or 0)) for place in places})
    return all(one[0] != other[0] or one[2] <= other[1] for one, other in pairwise(spans))


def _swap(edits: Edits, message: Node, new: bytes | Sequence[Piece]) -> None:
    """Put other fields in place of an operator or a constant of a graph."""
    parent = message.parent
    assert parent is not None
    edits.replace(parent, message.tag, message.end, new)


def _nodes(operators: Sequence[bytes]) -> bytes:
    """Return operators as fields of a graph."""
    return b"".join(bytes_field(NODES, item) for item in operators)


def _others(item: Operator) -> bytes:
    """Return the fields of an operator that say nothing of what it does: documentation, metadata."""
    message = item.message
    return b"".join(
        bytes(message.data[field.tag : field.end])
        for field in message.fields()
        if field.number not in _OWN and field.kind == BYTES
    )


def _free(name: str, template: Template) -> str:
    """Return a name that nothing of the model has."""
    while name in template.model.names:
        name += "_"
    return name


def _entries(planned: Planned, template: Template) -> Iterator[Entry]:
    if planned.form is None:
        for role, slot in planned.site.slots.items():
            if slot.values is not None:
                yield Entry(planned.local, role, slot.length, None, computed=True)
                continue
            constant = slot.constant
            yield Entry(constant.name, role, constant.nbytes, slot.conversion, kept=constant)
        return
    for numbers in planned.form.numbers:
        name = _free(planned.local + numbers.suffix, template) if numbers.suffix else planned.local
        yield Entry(name, numbers.role, numbers.nbytes, numbers.conversion, numbers)
