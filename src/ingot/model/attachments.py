"""What travels inside an artifact beside its weights: a draft head, a compiled package, a program, a graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ingot.model.part import Part
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
