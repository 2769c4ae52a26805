"""Find the constants of a program, and the tensors that they form (spec/coreml.md, "Operations").

A constant is a ``const`` with an array, or a ``constexpr_*`` operation: iOS 16 declares its parameters as attributes,
iOS 18 as inputs. Operations that feed each other form one tensor: packed if a codec has a layout for them, else with
the computed values. Other stored arrays of the program are listed as unread.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from ingot.formats.coreml.compressed import MAPPED, ConstantTensor, computed_tensor, is_array
from ingot.formats.coreml.graph import Graph
from ingot.formats.coreml.mil import CONSTEXPR, Operation, Program
from ingot.formats.coreml.site import LeftError, Site
from ingot.formats.coreml.values import Value
from ingot.formats.coreml.weights import Weights


@dataclass(slots=True)
class Constants:
    """The tensors of a program, and by name the reasons why other constants are not read.

    ``covered`` are the values (by ``id``) and blobs that belong to tensors or to constants listed as unread.
    """

    sites: list[Site] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    covered: set[object] = field(default_factory=set)

    def unique(self, name: str) -> str:
        """Return ``name``, with a suffix if another tensor has it, and register the result.

        Separate blocks of a program may use the same names.
        """
        unique = name
        while unique in self.names:
            self.names[name] += 1
            unique = f"{name}~{self.names[name]}"
        self.names[unique] = 1
        return unique

    def cover(self, value: Value) -> None:
        """Record that a value belongs to a tensor, or to a constant listed as unread."""
        self.covered.add(id(value))
        if value.blob is not None:
            self.covered.add((value.blob.file, value.blob.offset))

    def is_covered(self, value: Value) -> bool:
        """Return whether ``cover`` recorded a value, or another value with the same blob."""
        return id(value) in self.covered or (
            value.blob is not None and (value.blob.file, value.blob.offset) in self.covered
        )


def find_sites(program: Program, weights: Weights) -> tuple[list[Site], dict[str, str]]:
    """Return the tensors of a program in the order of their blobs, and why other constants are not read, by name.

    Names are those of the operations' outputs, or ``function/output`` if there are several functions. If separate
    blocks use the same name, ``~2`` and so on are appended in the program's order.

    Raises ``FormatError`` with the rules of ``Graph``, ``BlobFile`` and of contradicting operations.
    """
    result = Constants()
    several = len(program.active) > 1
    for function in program.active:
        _read_function(result, program, function, weights, f"{function}/" if several else "")
    _list_unread(result, program)
    shared = {id(operation) for site in result.sites for operation in site.shared}
    sites = [replace(site, feeds=True) if id(site.last) in shared else site for site in result.sites]
    sites.sort(key=lambda site: site.first_offset)  # a stable sort: tensors with shared blobs keep the program's order
    return sites, result.unread


def _read_function(result: Constants, program: Program, function: str, weights: Weights, prefix: str) -> None:
    operations, uses = program.active[function], program.uses[function]
    graph = Graph(program, function, weights)
    feeding = Counter(
        name
        for operation in operations
        if operation.type.startswith(CONSTEXPR)
        for name in operation.inputs.values()
        if isinstance(name, str)
    )
    for operation in operations:
        if operation.constant:
            feeds = any(
                feeding[output.name] and feeding[output.name] == uses[output.name] for output in operation.outputs
            )
            _read_constant(result, graph, operation, prefix, feeds=feeds)
        graph.add(operation)


def _read_constant(result: Constants, graph: Graph, operation: Operation, prefix: str, *, feeds: bool) -> None:
    """Add the tensor of an operation to ``result``, or the reason why the operation is no tensor.

    An operation that only feeds other constants (``feeds``) is checked but not added.
    """
    if feeds and operation.type == "const":
        return
    try:
        tensor = _read_tensor(graph, operation)
        chain = graph.feeders(operation) if tensor is not None and not feeds else []
    except LeftError as reason:
        if not feeds:
            name = operation.outputs[0].name if operation.outputs else operation.location
            result.unread[result.unique(prefix + name)] = str(reason)
            for value in operation.values:
                result.cover(value)
        return
    if tensor is None or feeds:
        return
    exclusive = graph.exclusive(operation, chain)
    shared = tuple(item for item in chain if item not in exclusive)
    name = result.unique(prefix + operation.outputs[0].name)
    site = Site(
        name, tensor.shape, str(tensor.type.dtype), tensor.layout, tensor.slots, (*exclusive, operation), shared
    )
    result.sites.append(site)
    for item in (*chain, operation):
        for value in item.values:
            result.cover(value)


def _read_tensor(graph: Graph, operation: Operation) -> ConstantTensor | None:
    """Return the tensor of an operation; None for a setting. Raises ``LeftError``."""
    mapping = MAPPED.get(operation.type)
    reason = "no codec can express it"
    if mapping is not None:
        try:
            return mapping(graph, operation)
        except LeftError as error:
            reason = str(error)
    if operation.type == "const":
        raise LeftError(reason)
    try:
        return computed_tensor(graph, operation)
    except LeftError as error:
        raise LeftError(f"{reason}; {error}" if mapping is not None and str(error) != reason else str(error)) from error


def _list_unread(result: Constants, program: Program) -> None:
    """List every stored array that belongs to no tensor."""
    active = {id(operation) for operations in program.active.values() for operation in operations}
    several = len(program.active) > 1
    for operation in program.operations:
        name = operation.outputs[0].name if operation.outputs else operation.type
        name = f"{operation.function}/{name}" if several else name
        for key, value in (*operation.inputs.items(), *operation.attributes.items()):
            if not isinstance(value, Value) or result.is_covered(value) or not (value.blob or is_array(value)):
                continue
            result.cover(value)
            reason = (
                f"{operation.type} takes it directly as {key}, not from a constant"
                if id(operation) in active
                else "it belongs to a specialization that the function does not run"
            )
            result.unread[result.unique(f"{name}.{key}" if not operation.constant else name)] = reason
    for value in program.stray:
        if value.blob is not None and not result.is_covered(value):
            result.cover(value)
            result.unread[result.unique(f"blob {value.blob.offset}")] = "it is in a list, or outside of operations"
