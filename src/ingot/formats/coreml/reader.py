"""Reader of packages: parts are located and checked, but only zero points are read (spec/coreml.md)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ingot.formats.base import Catalog
from ingot.formats.coreml.site import Site, Slot
from ingot.formats.coreml.template import Template, open_files
from ingot.formats.coreml.weights import as_file
from ingot.formats.shared.numbers import ComputedSource, ConvertedSource
from ingot.model.artifact import Attachments
from ingot.model.bytesource import MemorySource
from ingot.model.part import Part
from ingot.model.store import Store
from ingot.model.tensor import Tensor
from ingot.reporting.report import Column, Table


def read_package(store: Store) -> Catalog:
    """Return the catalog of the package in ``store``; raises the errors of ``Template`` and ``open_files``."""
    files, sources = open_files(store)
    try:
        template = Template(files)
        tensors = {site.name: _tensor(template, site) for site in template.sites}
    except BaseException:
        for source in sources:
            source.close()
        raise
    return Catalog(
        tensors,
        metadata=metadata_of(template),
        headers=template.headers,
        sources=tuple(sources),
        unread=template.unread,
        attachments=Attachments(program=template),
        details=partial(_details, template),
    )


def metadata_of(template: Template) -> dict[str, str]:
    """Return metadata about the program, for containers of other formats."""
    program = template.program
    opsets = ", ".join(f"{name}: {opset}" for name, opset in program.opsets.items())
    return {"coreml_specification": str(program.specification), "coreml_opsets": opsets}


def _tensor(template: Template, site: Site) -> Tensor:
    parts = {role: part_of(template, slot, f"{site.name}: {role}") for role, slot in site.slots.items()}
    return Tensor(site.name, site.shape, site.dtype, site.layout.codec, parts, site.layout.attributes())


def part_of(template: Template, slot: Slot, location: str) -> Part:
    """Return the numbers of a slot as a part."""
    if slot.computed is not None:
        expression = slot.computed
        source = ComputedSource(
            lambda: as_file(expression.values(template.weights)), slot.length, expression.memory, location
        )
        return Part(slot.dtype, slot.length, source, where=location, occupies=slot.stored)
    value = slot.values[0]
    if slot.spread is not None:

        def read() -> bytes:
            return slot.to_part(template.weights.read(value))

        return Part(
            slot.dtype, slot.length, ConvertedSource(read, slot.length, location), where=location, occupies=slot.stored
        )
    if value.blob is None:
        return Part(slot.dtype, slot.length, MemorySource(value.bytes(), location), where=location)
    file, blob = template.weights.locate(value)
    return Part(slot.dtype, blob.length, file.source, blob.offset, where=f"{file.source.name}: {location}")


def _details(template: Template) -> Sequence[Table]:
    program = template.program
    rows = [
        (name, opset, len(program.active[name]), sum(site.last.function == name for site in template.sites))
        for name, opset in program.opsets.items()
    ]
    title = f"ML program, specification version {program.specification}"
    columns = (
        Column("", head="function"),
        Column("", head="opset"),
        Column("", "count", "operations"),
        Column("", "count", "tensors"),
    )
    return [Table("", columns, rows, title)]
