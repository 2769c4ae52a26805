"""Which way round the matrices of a checkpoint lie, beside those of the graph that they go into (``spec/onnx.md``)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ingot.core.names import layer_path, role_of
from ingot.formats.onnx.facing import EITHER, INPUTS, OUTPUTS, Orientation
from ingot.formats.onnx.format import OnnxFormat
from ingot.model.checkpoint import Checkpoint

_DIGITS = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True)
class Pair:
    """A place of the graph and the tensor that takes it."""

    place: str
    tensor: str


@dataclass(frozen=True, slots=True)
class _Kind:
    """What matrices have in common that the same code makes: the stack of layers, and the word for the array in it."""

    stack: str
    word: str

    @classmethod
    def of(cls, name: str) -> _Kind:
        path = layer_path(name) or ""
        pieces = re.split(r"[./]", name)
        return cls(_DIGITS.sub("*", path), _DIGITS.sub("*", pieces[-1]))


class Facing:
    """Which way round each tensor lies that takes a place of a graph.

    The shape of a matrix tells, unless it is square. Of a square one the graph's operators tell how they take it, and
    how the checkpoint has it is told by its name, if only graphs have such, or by others that are not square: those
    of the same stack of layers, or all, where all are [outputs, inputs]. None of them is a head or an embedding: these
    are so where other matrices are [inputs, outputs] as well (GPT-2). Nor are arrays of modules (``q_proj.weight``)
    and others (``text_projection``) taken for one another.
    """

    def __init__(self, checkpoint: Checkpoint, graph: Checkpoint, format: OnnxFormat, pairs: Sequence[Pair]) -> None:
        self._checkpoint, self._graph, self._format = checkpoint, graph, format
        self._told: dict[_Kind, set[Orientation]] = {}
        for pair in pairs:
            face = self._by_shape(pair)
            if face is not None and role_of(pair.tensor) not in ("head", "embedding"):
                self._told.setdefault(_Kind.of(pair.tensor), set()).add(face)

    def turned(self, pair: Pair) -> bool | None:
        """Whether a tensor has its last two axes the other way round than its place; None where nothing tells.

        Its shape is that of the place, or that with the last two axes changed.
        """
        own, other = self._graph[pair.place].shape, self._checkpoint[pair.tensor].shape
        if len(own) < 2 or own[-1] != own[-2] or own[-1] <= 1:
            return own != other
        wanted, graphs_own = self._format.face(pair.place), self._format.is_own(pair.tensor)
        if wanted == EITHER or (graphs_own and pair.tensor == pair.place):
            return False
        found = (self._format.face(pair.tensor) if graphs_own else None) or self._of_others(pair.tensor)
        return None if wanted is None or found is None else found != wanted

    def _by_shape(self, pair: Pair) -> Orientation | None:
        """Return how a matrix lies in the checkpoint that is not square; None where that does not tell."""
        own, other = self._graph[pair.place].shape, self._checkpoint[pair.tensor].shape
        if len(own) < 2 or own[-1] == own[-2] or other not in (own, (*own[:-2], own[-1], own[-2])):
            return None
        face = self._format.face(pair.place)
        if face not in (OUTPUTS, INPUTS):
            return None
        return OUTPUTS if (own == other) == (face == OUTPUTS) else INPUTS

    def _of_others(self, name: str) -> Orientation | None:
        """Return how a matrix lies as others tell that are not square; None where they do not, or not the same."""
        kind = _Kind.of(name)
        near = self._told.get(kind, set())
        if len(near) == 1 and role_of(name) not in ("head", "embedding"):
            return next(iter(near))
        every = set[Orientation]().union(*(faces for other, faces in self._told.items() if other.word == kind.word))
        return OUTPUTS if every == {OUTPUTS} else None
