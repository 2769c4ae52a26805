"""Which operations of a program are constants, and what tensors they are (spec/coreml.md, "Operations").

A constant is a ``const`` whose numbers lie in a weight file, or a ``constexpr_*`` operation: those of iOS 16 state
their parameters as attributes, those of iOS 18 as inputs. Operations that feed one another make one tensor where a
codec says the same; all others stay as they are and are named in a note.
"""

from __future__ import annotations

from ingot.errors import FormatError
from ingot.formats.coreml.compressed import MAPPED
from ingot.formats.coreml.graph import Graph, Weights
from ingot.formats.coreml.mil import Operation, Program
from ingot.formats.coreml.site import LeftError, Site

CONSTEXPR = "constexpr_"
LEFT_RULE = "coreml.left"


def find_sites(program: Program, weights: Weights) -> tuple[list[Site], list[tuple[str, str]]]:
    """Return the tensors of a program in the order of their blobs, and notes of the constants that are none.

    Names are those of the operations' outputs; of a program with several functions, ``function/output``.

    Raises ``FormatError`` with the rules of ``Graph``, ``BlobFile`` and of contradicting operations.
    """
    sites: list[Site] = []
    notes: list[tuple[str, str]] = []
    several = len(program.active) > 1
    for function in program.active:
        own_sites = _sites_of(program, function, weights, f"{function}/" if several else "", notes)
        sites += own_sites
    names: set[str] = set()
    for site in sites:
        if site.name in names:
            raise FormatError(
                "coreml.duplicate-name",
                f"expected each name once, found {site.name[:200]!r} again",
                where=site.last.where,
            )
        names.add(site.name)
    sites.sort(key=lambda site: site.first_offset)  # stable: the program's order where blobs are shared
    return sites, notes


def _sites_of(
    program: Program, function: str, weights: Weights, prefix: str, notes: list[tuple[str, str]]
) -> list[Site]:
    operations = program.active[function]
    graph = Graph(program, function, weights)
    fed = {
        (id(operation.block), name)
        for operation in operations
        if operation.type.startswith(CONSTEXPR)
        for name in operation.inputs.values()
        if isinstance(name, str)
    }
    sites = []
    for operation in operations:
        if operation.type == "const" or operation.type.startswith(CONSTEXPR):
            feeds = any((id(operation.block), output.name) in fed for output in operation.outputs)
            site = None if feeds and operation.type == "const" else _site(graph, operation, prefix, notes, feeds=feeds)
            if site is not None:
                sites.append(site)
        graph.add(operation)
    return sites


def _site(graph: Graph, operation: Operation, prefix: str, notes: list[tuple[str, str]], *, feeds: bool) -> Site | None:
    """Return the tensor of an operation; None, and a note, where there is none. What feeds another is only checked."""
    mapping = MAPPED.get(operation.type)
    try:
        made = mapping(graph, operation) if mapping is not None else None
        reason = "" if mapping is not None else "no codec says the same"
        if made is not None and graph.shared(made.operations):
            made, reason = None, "what feeds it is used elsewhere too"
    except LeftError as error:
        made, reason = None, str(error)
    if reason and not feeds:
        notes.append((LEFT_RULE, f"{operation.where} stays as it is: {reason}"))
    return made.site(prefix + operation.outputs[0].name) if made is not None and not feeds else None
