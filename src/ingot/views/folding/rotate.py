"""Rotations that nothing runs for: of the residual stream (R1) and of value heads (R2), folded into the weights.

QuaRot (arXiv 2404.00456) and SpinQuant (arXiv 2405.16406) have the names. A norm by root mean square turns with what it
norms, once its weight is folded into the matrices behind it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ingot.artifacts.companions import companion_config
from ingot.errors import CodecError, UnsupportedError, UsageError
from ingot.model.checkpoint import Checkpoint
from ingot.model.reading.view import View
from ingot.model.tensor import Array
from ingot.naming.config import CONFIG
from ingot.quantization.hadamard import LARGEST_SMALL, order_of, signs_of
from ingot.quantization.maps import Chain, RepeatableMap, Rotation, Scale
from ingot.stores.temporary import TemporaryFolder
from ingot.views.folding.families import HEAD, RESIDUAL, VALUE
from ingot.views.folding.fold import Told, changed_names, fold
from ingot.views.folding.graph import Graph, graph_of

_LEAST = 1e-30
_TIED = "tie_word_embeddings"


@dataclass(frozen=True, slots=True)
class RotationFolding:
    """Rotations of streams: ``residual`` of the residual stream, ``value`` of each head of a value stream."""

    checkpoint: Checkpoint
    graph: Graph
    residual: Rotation | None
    value: Rotation | None
    weights: dict[str, Array] = field(default_factory=dict)

    def touches(self, stream: str) -> bool:
        if stream == RESIDUAL or stream in self.graph.norms:
            return self.residual is not None
        return self.value is not None and stream.endswith(f".{VALUE}")

    def map_of(self, stream: str) -> RepeatableMap | None:
        if stream == RESIDUAL:
            return self.residual
        if stream not in self.graph.norms:
            return self.value
        assert self.residual is not None
        weight = self._weight(stream)
        # Of channels that are dead nothing is known.
        reciprocal = np.divide(1, weight, out=np.zeros_like(weight), where=np.abs(weight) > _LEAST)
        return Chain([Scale(reciprocal, weight), self.residual])

    def norm(self, stream: str) -> Array:
        return np.ones(self.graph.sizes[stream], np.float32)

    def _weight(self, stream: str) -> Array:
        """Return what a norm multiplied by."""
        found = self.weights.get(stream)
        if found is None:
            name = self.graph.norms[stream]
            found = self.checkpoint[name].numpy("f32")
            found = found + np.float32(1) if self.graph.wiring.shifted else found
            if not np.isfinite(found).all():
                raise CodecError("fold.value", "expected finite weights, found NaN or infinity", where=name)
            self.weights[stream] = found
        return found


def rotate(
    checkpoint: Checkpoint, *, r1: bool = True, r2: bool = False, seed: int = 0, dtype: str | None = None
) -> Checkpoint:
    """Return a model turned within itself: other weights, the same outputs up to rounding.

    Parameters
    ----------
    checkpoint : Checkpoint
        Of a model's folder, with ``config.json``.
    r1 : bool
        Turn the residual stream: embedding, norms, all matrices that read or write it, the head. Weights of norms
        become 1. A head that is the embedding becomes a tensor of its own.
    r2 : bool
        Turn what goes through attention, within each head: values and the matrix behind them.
    seed : int
        Of the signs that come before each Hadamard matrix.
    dtype : str, optional
        What changed tensors are rounded to: ``f32``, ``bf16`` or ``f16``; default the element type of each.

    Raises
    ------
    UsageError
        ``fold.nothing``: neither of them; ``view.delta``.
    UnsupportedError
        ``fold.norm``: R1 of a model that norms what its layers put out; what ``graph_of`` raises.
    """
    graph = graph_of(checkpoint)
    names = [*graph.sites, graph.head]
    stated = {name: checkpoint[name if name in checkpoint else graph.embedding].dtype for name in names}
    return rotated(checkpoint, graph, (r1, r2, seed), dict.fromkeys(names, dtype) if dtype else stated)[0].checkpoint


def rotated(
    checkpoint: Checkpoint, graph: Graph, rotations: tuple[bool, bool, int], dtypes: Mapping[str, str]
) -> tuple[View, RotationFolding]:
    """Return a view of the rotated model, and the folded rotations.

    Parameters
    ----------
    checkpoint : Checkpoint
    graph : Graph
    rotations : tuple
        ``r1``, ``r2`` and ``seed`` of ``rotate``.
    dtypes : mapping
        Element types of the changed tensors by name; f32 for tensors without an entry.

    Raises the errors of ``rotate``.
    """
    r1, r2, seed = rotations
    folding = RotationFolding(checkpoint, graph, *_rotations(checkpoint, graph, rotations))
    notes = [
        f"{name}: {rotation.order} with signs of seed {seed}"
        for name, rotation in (("residual stream turned", folding.residual), ("value heads turned", folding.value))
        if rotation is not None
    ]
    more: dict[str, str] = {}
    untied = r1 and graph.tied
    if untied and graph.head not in checkpoint:
        graph.add(graph.head_site(checkpoint))
        more = {graph.head: graph.embedding}
        rows = checkpoint[graph.embedding].shape[0]
        notes.append(
            f"{graph.head} has {rows} rows of its own now, and config.json says {_TIED} false: the last norm's weight "
            "is in the head and not in the embedding"
        )
    folder = TemporaryFolder({CONFIG: _untied(checkpoint)}) if untied else None
    said = [r1, r2, seed, {name: dtypes.get(name, "f32") for name in changed_names(graph, folding.touches)}]
    told = Told(_rotate, (r1, r2, seed, dict(dtypes)), said)
    return View(fold(checkpoint, folding, told, dtypes, more, folder), notes), folding


def _rotate(checkpoint: Checkpoint, argument: tuple[bool, bool, int, Mapping[str, str]]) -> Checkpoint:
    r1, r2, seed, dtypes = argument
    return rotated(checkpoint, graph_of(checkpoint), (r1, r2, seed), dtypes)[0].checkpoint


def _rotations(
    checkpoint: Checkpoint, graph: Graph, asked: tuple[bool, bool, int]
) -> tuple[Rotation | None, Rotation | None]:
    r1, r2, seed = asked
    if not (r1 or r2):
        raise UsageError("expected r1, r2 or both, found neither", rule="fold.nothing")
    if r1 and graph.behind:
        raise UnsupportedError(
            f"the residual stream cannot be turned: {graph.behind[0]} multiplies what a layer puts out, number by "
            "number, and nothing behind it can take its weight; r2 alone can be folded",
            rule="fold.norm",
            where=checkpoint.location,
        )

    def made(size: int, label: str) -> Rotation:
        order = order_of(size)
        if order.small > LARGEST_SMALL:
            raise UnsupportedError(
                f"expected a size that is a power of 2 times at most {LARGEST_SMALL}, found {size}, {order.small} "
                f"times {order.power}",
                rule="fold.tensor",
                where=checkpoint.location,
            )
        return Rotation(order, signs_of(size, seed, label))

    residual = made(graph.sizes[HEAD], RESIDUAL) if r1 else None
    value = made(graph.head_size, VALUE) if r2 else None
    if value is not None:
        sizes = {size for stream, size in graph.sizes.items() if stream.endswith(f".{VALUE}")}
        if len(sizes) != 1:
            raise UnsupportedError(
                f"expected as many value heads in every layer, found {sorted(sizes)} numbers", rule="fold.tensor"
            )
        value = value.repeat(graph.head_size, sizes.pop() // graph.head_size)
    return residual, value


def _untied(checkpoint: Checkpoint) -> bytes:
    config = {**companion_config(checkpoint.companions, "fold.config"), _TIED: False}
    return (json.dumps(config, indent=2) + "\n").encode()
