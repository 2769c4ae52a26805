"""What a format's writer gets: all that one artifact holds, except the bytes of its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ingot.model.layouts.base import Described
from ingot.model.part import Part
from ingot.model.spec import TensorSpec
from ingot.model.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Attachments:
    """At most one of each kind.

    Parameters
    ----------
    draft : mapping of name to Tensor, optional
        The tensors of a speculative-decoding draft head, under the names of its own checkpoint.
    draft_vocab : int
        The vocabulary that the file states of a head, where its tensors do not tell.
    coreml : Part, optional
        The bytes of a zipped Core ML package.
    program : mapping of path to Part, optional
        The files of the Core ML package whose constants the tensors are: what they are written back into.
    graph : mapping of name to Part, optional
        The files of the ONNX model whose constants the tensors are, likewise.
    """

    draft: Mapping[str, Tensor] | None = None
    coreml: Part | None = None
    program: Mapping[str, Part] | None = None
    graph: Mapping[str, Part] | None = None
    draft_vocab: int = 0

    def kinds(self) -> Iterator[str]:
        """Yield the names of those that are there."""
        if self.draft is not None:
            yield "draft"
        if self.coreml is not None:
            yield "coreml"
        if self.program is not None:
            yield "program"
        if self.graph is not None:
            yield "graph"

    def __bool__(self) -> bool:
        return any(self.kinds())


NOTHING = Attachments()


@dataclass(frozen=True, slots=True)
class Artifact:
    """What is to be written.

    Parameters
    ----------
    tensors : sequence of TensorSpec
        In the order in which they are written.
    metadata : mapping
        As the format carries it.
    attachments : Attachments
        What lies beside the weights; of the kinds that the format carries.
    config : bytes, optional
        The model's ``config.json`` as it is true of the result, for a format that says in it how tensors are packed:
        its writer writes the file with its own keys in it. Other formats leave it alone: it travels as a companion.
    before : mapping of name to Described
        What tensors were in the source that ``config`` is of, so that a writer knows for which of them it still holds.
    """

    tensors: Sequence[TensorSpec]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    attachments: Attachments = NOTHING
    config: bytes | None = None
    before: Mapping[str, Described] = field(default_factory=dict)
