"""The ONNX format as the rest of Ingot sees it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ingot.formats.base import Catalog, FormatTraits, WriteOptions
from ingot.formats.onnx.carry import Named, names_of, original, other_name, plan_tensor, reason_against
from ingot.formats.onnx.facing import INPUTS, OUTPUTS, Face, Faces
from ingot.formats.onnx.reader import read_model
from ingot.formats.onnx.sites import LeftError
from ingot.formats.onnx.template import Template
from ingot.formats.onnx.writer import OnnxWriter, model_size, template_of
from ingot.formats.single import BySuffix
from ingot.formats.usage import WrittenArtifact, in_python
from ingot.model.artifact import Artifact
from ingot.model.attachments import Attachments
from ingot.model.bytesource import Target
from ingot.model.spec import TensorSpec
from ingot.model.store import Store

# What PyTorch's exporters call values that are no parameter of a module, such as a matrix that they turned.
_EXPORTED = re.compile(r"onnx::|val_[0-9]+$")


class OnnxFormat(BySuffix):
    """ONNX models; see spec/onnx.md.

    Parameters
    ----------
    template : Template, optional
        The model whose graph tensors are to be written into, where it is known: then ``refuses`` knows the names,
        shapes and operators that there are. ``fit`` makes such a format.
    """

    name = "onnx"
    suffixes: tuple[str, ...] = (".onnx",)
    summary = "ONNX models (.onnx): constants of their graphs, dense or codes, in the model or in files beside it"
    traits = FormatTraits(
        attachments=("graph",),
        exported=True,
        fixed_scales=True,
    )

    def __init__(self, template: Template | None = None) -> None:
        self._template = template
        self._named: Mapping[str, Named] = {} if template is None else names_of(template.model, template.sites)
        self._faces = None if template is None else Faces(template.model)

    def claims(self, name: str, head: bytes) -> bool:
        """By the suffix: protocol buffers have no magic."""
        return name.lower().endswith(self.suffixes)

    def for_attachments(self, attachments: Attachments) -> OnnxFormat:
        """Return the format for the graph that is attached; raises ``UnsupportedError`` ``onnx.no-graph``."""
        return OnnxFormat(template_of(attachments))

    def why_unsupported(self, spec: TensorSpec) -> str | None:
        """Why no graph, or not this one, can have the tensor; None if it can."""
        if self._template is None:
            return reason_against(spec)
        named = self._named.get(spec.name)
        if named is None:
            return "the graph has no constant of this name"
        try:
            plan_tensor(self._template.model, named, spec)
        except LeftError as reason:
            return str(reason)
        return None

    def why_constant(self, name: str) -> str | None:
        """Return why the model keeps a tensor as it is; None if a recipe may change it."""
        return (self._named[name].site.stays or None) if name in self._named else None

    def has_constant(self, name: str) -> bool:
        """Return False: each constant of a graph gets values."""
        return False

    def local_name(self, name: str) -> str:
        """Return the name that a tensor has in its graph: without the path of a graph within the model's."""
        return self._named[name].local if name in self._named else name

    def declared_dtype(self, name: str) -> str | None:
        """Return the element type that the graph has under a name; None where it has no such tensor."""
        return self._named[name].site.dtype if name in self._named else None

    def turned_name(self, name: str, bits: int) -> str | None:
        """Return the name of a matrix with its rows and columns turned; None where the graph has no place for it."""
        named = self._named.get(name)
        return None if named is None else other_name(named, bits)

    def is_turned(self, name: str) -> bool:
        """Whether the rows of a matrix are outputs, as ``MatMulNBits`` has them."""
        return name in self._named and self._named[name].turned

    def face(self, name: str) -> Face | None:
        """Return which way round the graph takes a matrix of this name; None where its operators do not tell."""
        named = self._named.get(name)
        if named is None or self._faces is None:
            return None
        if named.turned:
            return OUTPUTS
        return INPUTS if named.others else self._faces.of(named.site.graph, named.local, len(named.site.shape))

    def is_own(self, name: str) -> bool:
        """Whether only a graph has such a name: exporters' for values that they made, quantizers' for codes."""
        local = self.local_name(name)
        return _EXPORTED.match(local) is not None or original(local) != local

    def original_name(self, name: str) -> str:
        """Return a constant's name without what quantizers append to it."""
        return original(name)

    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Validate and locate; there are no digests to verify."""
        return read_model(store, name)

    def metadata(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """None: the model has its own."""
        return {}

    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        """Exact bytes of all files."""
        return model_size(self.file_name("model"), artifact, options)

    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> OnnxWriter:
        """Start writing into the graph that is attached; errors as ``OnnxWriter``."""
        return OnnxWriter(target, name, artifact, options)

    def commands(self, made: WrittenArtifact) -> Sequence[Sequence[str]]:
        """onnxruntime's: the names of what the graph takes."""
        names = "[each.name for each in onnxruntime.InferenceSession({}).get_inputs()]"
        return [in_python(f"import onnxruntime; print({names})", made.path)]
