"""The format of Core ML packages (``.mlpackage``): supported tensors, reader and writer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ingot.errors import FormatError
from ingot.formats.base import Catalog, Format, FormatTraits, WriteOptions
from ingot.formats.coreml.carry import plan_operations
from ingot.formats.coreml.layout import FEEDS, why_unsupported
from ingot.formats.coreml.package import DATA, MANIFEST, MAX_MANIFEST, parse_manifest
from ingot.formats.coreml.reader import read_package
from ingot.formats.coreml.site import LeftError
from ingot.formats.coreml.template import Template
from ingot.formats.coreml.writer import CoremlWriter, package_size, template_of
from ingot.model.artifact import Artifact, Attachments
from ingot.model.bytesource import Target
from ingot.model.spec import TensorSpec
from ingot.model.store import Store

_COMPRESSED = ("_palettized_pcs", "_palettized", "_quantized", "_sparsified")
"""Suffixes that coremltools 9 appends to the name of a constant that it compresses."""


class CoremlFormat(Format):
    """Core ML packages with an ML program; see spec/coreml.md.

    Parameters
    ----------
    template : Template, optional
        The package whose program is filled with tensors; names, shapes and operations are then checked.
        ``for_attachments`` returns a format with a template.
    """

    name = "coreml"
    suffixes: tuple[str, ...] = (".mlpackage",)
    summary = "Core ML packages (.mlpackage): constants of an ML program, compressed or not"
    traits = FormatTraits(
        attachments=("program",),
        folder=True,
    )

    def __init__(self, template: Template | None = None) -> None:
        self._template = template
        self._sites = {} if template is None else {site.name: site for site in template.sites}

    def claims(self, name: str, head: bytes) -> bool:
        """Return whether ``name`` is the manifest's name."""
        return name == MANIFEST

    def entry(self, names: Sequence[str]) -> str | None:
        """Return the manifest's name if the folder ``Data`` is next to the manifest, else None."""
        return MANIFEST if MANIFEST in names and f"{DATA}/" in names else None

    def has_sentinel(self, store: Store) -> bool:
        """Return whether the manifest names a root model, because a package has no other sentinel."""
        source = store.open(MANIFEST)
        try:
            parse_manifest(bytes(source.view(0, min(source.size, MAX_MANIFEST))), MANIFEST)
        except FormatError:
            return False
        finally:
            source.close()
        return True

    def for_attachments(self, attachments: Attachments) -> CoremlFormat:
        """Return the format for the attached program; raises the errors of ``template_of``."""
        return CoremlFormat(template_of(attachments))

    def why_unsupported(self, spec: TensorSpec) -> str | None:
        """Return why the template, or any package if there is none, cannot store the tensor; None if it can."""
        if self._template is not None:
            return why_unsupported(self._template, self._sites.get(spec.name), spec)
        try:
            plan_operations(spec, ios18=True)
        except LeftError as reason:
            return str(reason)
        return None

    def why_constant(self, name: str) -> str | None:
        """Return why the program requires a tensor to stay unchanged; None if a recipe may change it."""
        site = self._sites.get(name)
        return FEEDS if site is not None and site.feeds else None

    def has_constant(self, name: str) -> bool:
        """Return whether an array is in the program itself; if no values are written for it, it keeps its values."""
        site = self._sites.get(name)
        return site is not None and site.inline

    def required_dtype(self, name: str, shape: tuple[int, ...]) -> str | None:
        """Return the element type of a tensor whose values are in the program, not in a weight file; else None.

        A recipe cannot change this type.
        """
        site = self._sites.get(name)
        return site.dtype if site is not None and site.inline else None

    def original_name(self, name: str) -> str:
        """Return a constant's name without the suffixes of coremltools, one for each compression."""
        while True:
            suffix = next((end for end in _COMPRESSED if name.endswith(end) and name != end), None)
            if suffix is None:
                return name
            name = name.removesuffix(suffix)

    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Return the catalog of a package; there are no digests to verify."""
        return read_package(store)

    def metadata(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an empty mapping, because the program has its own metadata."""
        return {}

    def file_name(self, stem: str) -> str:
        """Return the name of the manifest, which is the same in all packages."""
        return MANIFEST

    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        """Return the exact number of bytes of all files."""
        return package_size(artifact)

    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> CoremlWriter:
        """Return a writer that fills the attached program; raises the errors of ``CoremlWriter``."""
        return CoremlWriter(target, artifact)
