"""Artifacts: the input of a format's writer. An artifact contains everything except the bytes of its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ingot.model.layouts.base import LayoutSource
from ingot.model.part import Part
from ingot.model.spec import TensorSpec
from ingot.model.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Attachments:
    """Parts of an artifact that are not weights, at most one of each type.

    Parameters
    ----------
    draft : mapping of name to Tensor, optional
        The tensors of a speculative-decoding draft head, under the names that they have in the head's checkpoint.
    draft_vocab : int
        The size of the draft head's vocabulary if only the file states it; 0 if the head's tensors determine it.
    coreml : Part, optional
        The bytes of a zipped Core ML package.
    program : mapping of path to Part, optional
        The files of a Core ML package whose constants are the tensors. The writer fills a copy of it.
    graph : mapping of name to Part, optional
        The files of an ONNX model whose constants are the tensors. The writer fills a copy of it.
    """

    draft: Mapping[str, Tensor] | None = None
    coreml: Part | None = None
    program: Mapping[str, Part] | None = None
    graph: Mapping[str, Part] | None = None
    draft_vocab: int = 0

    def names(self) -> Iterator[str]:
        """Yield the names of the attachments that exist."""
        if self.draft is not None:
            yield "draft"
        if self.coreml is not None:
            yield "coreml"
        if self.program is not None:
            yield "program"
        if self.graph is not None:
            yield "graph"

    def __bool__(self) -> bool:
        return any(self.names())


NO_ATTACHMENTS = Attachments()


@dataclass(frozen=True, slots=True)
class Artifact:
    """The description of the files that a writer creates.

    Parameters
    ----------
    tensors : sequence of TensorSpec
        The tensors in the order in which they are written.
    metadata : mapping
        The metadata in the form in which the format stores it.
    attachments : Attachments
        Parts other than weights, only of types that the format can store.
    config : bytes, optional
        The model's ``config.json``, already adapted to the result. Only formats that describe the packing of tensors in
        this file use it: their writer adds its keys. For other formats the file is copied as a companion.
    before : mapping of name to LayoutSource
        The tensors of the source that ``config`` describes. A writer compares them with ``tensors`` to find the entries
        of ``config`` that still apply.
    """

    tensors: Sequence[TensorSpec]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    attachments: Attachments = NO_ATTACHMENTS
    config: bytes | None = None
    before: Mapping[str, LayoutSource] = field(default_factory=dict)
