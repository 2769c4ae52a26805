"""Reader of models: parts are located and checked, but not read (spec/onnx.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from ingot.formats.base import Catalog
from ingot.formats.onnx.sites import Site
from ingot.formats.onnx.template import Template
from ingot.formats.shared.numbers import ComputedSource, ConvertedSource
from ingot.model.artifact import Attachments
from ingot.model.layouts.dense import DenseLayout
from ingot.model.part import Part
from ingot.model.reading.lazy import LazyMap
from ingot.model.store import Store
from ingot.model.tensor import Tensor
from ingot.reporting.report import Column, Table

INNER_RULE = "onnx.inner-graphs"


def read_model(store: Store, name: str) -> Catalog:
    """Return the catalog of the model ``name`` of ``store``; raises the errors of ``Template``."""
    template = Template(store, name)
    sites = {site.name: site for site in template.sites}
    return Catalog(
        _tensors(template, sites),
        metadata=metadata_of(template),
        headers=template.headers,
        sources=tuple(template.sources),
        remarks=tuple(_inner(template)),
        unread=template.unread,
        attachments=Attachments(graph=template),
        details=partial(_details, template),
        aliases={site.name: site.alias for site in template.sites if site.alias},
    )


def _inner(template: Template) -> Iterator[tuple[str, str]]:
    """Yield a remark if tensors are in inner graphs, because their names begin with a path."""
    inner = [site for site in template.sites if site.graph.path]
    if inner:
        example = inner[0].graph.path[:80]
        text = f"{len(inner)} of {len(template.sites)} tensors are in inner graphs or in functions"
        yield INNER_RULE, f"{text}: their names begin with the path of their graph, such as {example!r}"


def metadata_of(template: Template) -> dict[str, str]:
    """Return metadata about the model, for containers of other formats."""
    model = template.model
    opsets = ", ".join(f"{domain or 'ai.onnx'}: {version}" for domain, version in model.opsets.items())
    metadata = {"onnx_ir_version": str(model.ir_version), "onnx_opsets": opsets}
    return {**metadata, **({"onnx_producer": model.producer} if model.producer else {})}


def _tensors(template: Template, sites: Mapping[str, Site]) -> Mapping[str, Tensor]:
    def build(name: str) -> Tensor:
        site = sites[name]
        parts = {role: part_of(template, site, role) for role in site.slots}
        return Tensor(name, site.shape, site.dtype, site.layout.codec, parts, site.layout.attributes())

    return LazyMap(sites, build)


def part_of(template: Template, site: Site, role: str) -> Part:
    """Return a part of a tensor as stored in the model."""
    slot = site.slots[role]
    location = f"{template.source.name}: {site.name}: {role}"
    conversion, constant, values = slot.conversion, slot.constant, slot.values
    if values is not None:
        source = ComputedSource(lambda: values.compute(template.bytes_of), slot.length, values.making, location)
        return Part(slot.dtype, slot.length, source, where=location, occupies=values.stored)
    if conversion is None:
        return constant.part(template.source, template.externals, slot.dtype, slot.logical)

    def read() -> bytes:
        return conversion.to_part(template.bytes_of(constant))

    return Part(
        slot.dtype,
        slot.length,
        ConvertedSource(read, slot.length, location),
        where=location,
        occupies=constant.nbytes,
    )


def _details(template: Template) -> Sequence[Table]:
    model, sites = template.model, template.sites
    counts = {"": 0}
    for graph in model.graphs:
        for operator in graph.operators:
            counts[operator.domain] = counts.get(operator.domain, 0) + 1
    rows = [(domain or "ai.onnx", model.opsets.get(domain, 0), counts.get(domain, 0)) for domain in model.opsets]
    packed = sum(site.layout.codec != DenseLayout.codec for site in sites)
    title = f"ONNX graph, version {model.ir_version}; {packed} of {len(sites)} tensors are codes"
    columns = (Column("", head="operators"), Column("", "count", "version"), Column("", "count", "used"))
    return [Table("", columns, rows, title)]
