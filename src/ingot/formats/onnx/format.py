"""The format of ONNX models (``.onnx``): supported tensors, reader and writer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ingot.formats.base import Catalog, FormatTraits, WriteOptions
from ingot.formats.onnx.carry import Named, names_of, original_name, other_name, plan_tensor, why_unsupported
from ingot.formats.onnx.facing import INPUTS, OUTPUTS, Orientation, OrientationFinder
from ingot.formats.onnx.reader import read_model
from ingot.formats.onnx.sites import LeftError
from ingot.formats.onnx.template import Template
from ingot.formats.onnx.writer import OnnxWriter, model_size, template_of
from ingot.formats.shared.single import BySuffix
from ingot.model.artifact import Artifact, Attachments
from ingot.model.bytesource import Target
from ingot.model.spec import TensorSpec
from ingot.model.store import Store

# prefixes in PyTorch's exporters of values that are no module's parameter, such as a transposed matrix
_EXPORTED = re.compile(r"onnx::|val_[0-9]+$")


class OnnxFormat(BySuffix):
    """The format of ONNX models; see spec/onnx.md.

    Parameters
    ----------
    template : Template, optional
        The model whose graph is filled with tensors; names, shapes and operators are then checked. ``for_attachments``
        returns a format with a template.
    """

    name = "onnx"
    suffixes: tuple[str, ...] = (".onnx",)
    summary = "ONNX models (.onnx): constants of their graphs, dense or codes, in the model or in separate files"
    traits = FormatTraits(
        attachments=("graph",),
        exported=True,
        fixed_scales=True,
    )

    def __init__(self, template: Template | None = None) -> None:
        self._template = template
        self._named: Mapping[str, Named] = {} if template is None else names_of(template.model, template.sites)
        self._orientations = None if template is None else OrientationFinder(template.model)

    def claims(self, name: str, head: bytes) -> bool:
        """Return whether the suffix is ``.onnx``, because protocol buffers have no magic bytes."""
        return name.lower().endswith(self.suffixes)

    def for_attachments(self, attachments: Attachments) -> OnnxFormat:
        """Return the format for the attached graph; raises ``UnsupportedError`` ``onnx.no-graph``."""
        return OnnxFormat(template_of(attachments))

    def why_unsupported(self, spec: TensorSpec) -> str | None:
        """Return why the template's graph, or any graph if there is none, cannot contain the tensor; None if it can."""
        if self._template is None:
            return why_unsupported(spec)
        named = self._named.get(spec.name)
        if named is None:
            return "the graph has no constant of this name"
        try:
            plan_tensor(self._template.model, named, spec)
        except LeftError as reason:
            return str(reason)
        return None

    def why_constant(self, name: str) -> str | None:
        """Return why the model requires a tensor to stay unchanged; None if a recipe may change it."""
        return (self._named[name].site.stays or None) if name in self._named else None

    def has_constant(self, name: str) -> bool:
        """Return False, because every constant of a graph is written."""
        return False

    def local_name(self, name: str) -> str:
        """Return a tensor's name within its graph, without the path of an inner graph."""
        return self._named[name].local if name in self._named else name

    def declared_dtype(self, name: str) -> str | None:
        """Return the element type that the graph declares for a tensor; None if the graph does not contain it."""
        return self._named[name].site.dtype if name in self._named else None

    def turned_name(self, name: str, bits: int) -> str | None:
        """Return a matrix's name in the other orientation, with codes of ``bits`` bits for ``MatMulNBits``.

        Returns None if the graph cannot contain the matrix in that orientation.
        """
        named = self._named.get(name)
        return None if named is None else other_name(named, bits)

    def is_turned(self, name: str) -> bool:
        """Return whether the rows of a matrix are outputs, which ``MatMulNBits`` needs."""
        return name in self._named and self._named[name].transposed

    def face(self, name: str) -> Orientation | None:
        """Return the orientation of a matrix in the graph; None if its operators do not define it."""
        named = self._named.get(name)
        if named is None or self._orientations is None:
            return None
        if named.transposed:
            return OUTPUTS
        if named.alternatives:
            return INPUTS
        return self._orientations.find(named.site.graph, named.local, len(named.site.shape))

    def is_own(self, name: str) -> bool:
        """Return whether only graphs use names of this kind: exporters' names of values, quantizers' names of codes."""
        local = self.local_name(name)
        return _EXPORTED.match(local) is not None or original_name(local) != local

    def original_name(self, name: str) -> str:
        """Return a constant's name without the suffixes of quantizers."""
        return original_name(name)

    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Return the catalog of a model; there are no digests to verify."""
        return read_model(store, name)

    def metadata(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an empty mapping, because the model has its own metadata."""
        return {}

    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        """Return the exact number of bytes of all files."""
        return model_size(self.file_name("model"), artifact, options)

    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> OnnxWriter:
        """Return a writer that fills the attached graph; raises the errors of ``OnnxWriter``."""
        return OnnxWriter(target, name, artifact, options)
