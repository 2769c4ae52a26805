"""Rotations without runtime cost, folded into the weights: of the residual stream (R1) and of value heads (R2).

QuaRot (arXiv 2404.00456) and SpinQuant (arXiv 2405.16406) introduced the names. An RMS norm commutes with a rotation
after its weight is folded into the matrices that read the norm.
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
from ingot.views.folding.fold import ViewKey, changed_names, fold
from ingot.views.folding.graph import Graph, graph_of

_MIN_WEIGHT = 1e-30
_TIED = "tie_word_embeddings"


@dataclass(frozen=True, slots=True)
class RotationFolding:
    """The rotations of a model.

    ``residual`` rotates the residual stream, and ``value`` each head of the value streams. A rotation is None if these
    streams are not rotated.
    """

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
        # a zero reciprocal for dead channels, whose weights cannot be recovered
        reciprocal = np.divide(1, weight, out=np.zeros_like(weight), where=np.abs(weight) > _MIN_WEIGHT)
        return Chain([Scale(reciprocal, weight), self.residual])

    def norm_weight(self, stream: str) -> Array:
        return np.ones(self.graph.sizes[stream], np.float32)

    def _weight(self, stream: str) -> Array:
        """Return the factor that the norm of ``stream`` had before folding: f32 [size]."""
        weight = self.weights.get(stream)
        if weight is None:
            name = self.graph.norms[stream]
            weight = self.checkpoint[name].numpy("f32")
            weight = weight + np.float32(1) if self.graph.wiring.shifted else weight
            if not np.isfinite(weight).all():
                raise CodecError("fold.value", "expected finite weights, found NaN or infinity", where=name)
            self.weights[stream] = weight
        return weight


def rotate(
    checkpoint: Checkpoint, *, r1: bool = True, r2: bool = False, seed: int = 0, dtype: str | None = None
) -> Checkpoint:
    """Return a rotated model: different weights, but the same outputs up to rounding.

    Parameters
    ----------
    checkpoint : Checkpoint
        A model's folder with ``config.json``.
    r1 : bool
        Rotate the residual stream: embedding, norms, all matrices that read or write it, the head. Weights of norms
        become 1. A tied head becomes a separate tensor.
    r2 : bool
        Rotate the values of attention within each head: values and the matrix that reads them.
    seed : int
        Seed of the random signs before each Hadamard matrix.
    dtype : str, optional
        Element type of changed tensors: ``f32``, ``bf16`` or ``f16``; by default the element type of each tensor.

    Raises
    ------
    UsageError
        ``fold.nothing``: neither r1 nor r2; ``view.delta``.
    UnsupportedError
        ``fold.norm``: R1 of a model with norms after its layers' outputs; and the errors of ``graph_of``.

    Examples
    --------
    >>> view = ingot.views.rotate(ingot.open("model"), r1=True)
    >>> view["lm_head.weight"].dtype
    'bf16'
    """
    graph = graph_of(checkpoint)
    names = [*graph.sites, graph.head]
    original = {name: checkpoint[name if name in checkpoint else graph.embedding].dtype for name in names}
    dtypes = dict.fromkeys(names, dtype) if dtype else original
    return fold_rotations(checkpoint, graph, (r1, r2, seed), dtypes)[0].checkpoint


def fold_rotations(
    checkpoint: Checkpoint, graph: Graph, rotations: tuple[bool, bool, int], dtypes: Mapping[str, str]
) -> tuple[View, RotationFolding]:
    """Return a view of the rotated model, and the rotations that it folds.

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
        for name, rotation in (("residual stream rotated", folding.residual), ("value heads rotated", folding.value))
        if rotation is not None
    ]
    new_tensors: dict[str, str] = {}
    untied = r1 and graph.tied
    if untied and graph.head not in checkpoint:
        graph.add(graph.head_site(checkpoint))
        new_tensors = {graph.head: graph.embedding}
        rows = checkpoint[graph.embedding].shape[0]
        notes.append(
            f"{graph.head} is a separate tensor of {rows} rows, and config.json has {_TIED} false: the last norm's "
            "weight is folded into the head and not into the embedding"
        )
    folder = TemporaryFolder({CONFIG: _config_without_tie(checkpoint)}) if untied else None
    description = [r1, r2, seed, {name: dtypes.get(name, "f32") for name in changed_names(graph, folding.touches)}]
    key = ViewKey(_rotate, (r1, r2, seed, dict(dtypes)), description)
    return View(fold(checkpoint, folding, key, dtypes, new_tensors, folder), notes), folding


def _rotate(checkpoint: Checkpoint, argument: tuple[bool, bool, int, Mapping[str, str]]) -> Checkpoint:
    r1, r2, seed, dtypes = argument
    return fold_rotations(checkpoint, graph_of(checkpoint), (r1, r2, seed), dtypes)[0].checkpoint


def _rotations(
    checkpoint: Checkpoint, graph: Graph, rotations: tuple[bool, bool, int]
) -> tuple[Rotation | None, Rotation | None]:
    r1, r2, seed = rotations
    if not (r1 or r2):
        raise UsageError("expected r1, r2 or both, found neither", rule="fold.nothing")
    if r1 and graph.post_norms:
        raise UnsupportedError(
            f"the residual stream cannot be rotated: the norm {graph.post_norms[0]} scales a layer's output, and no "
            "matrix after it can absorb its weight; r2 alone can be folded",
            rule="fold.norm",
            where=checkpoint.location,
        )

    def rotation(size: int, label: str) -> Rotation:
        order = order_of(size)
        if order.small > LARGEST_SMALL:
            raise UnsupportedError(
                f"expected a size that is a power of 2 times at most {LARGEST_SMALL}, found {size}, {order.small} "
                f"times {order.power}",
                rule="fold.tensor",
                where=checkpoint.location,
            )
        return Rotation(order, signs_of(size, seed, label))

    residual = rotation(graph.sizes[HEAD], RESIDUAL) if r1 else None
    value = rotation(graph.head_size, VALUE) if r2 else None
    if value is not None:
        sizes = {size for stream, size in graph.sizes.items() if stream.endswith(f".{VALUE}")}
        if len(sizes) != 1:
            raise UnsupportedError(
                f"expected value streams of one size in all layers, found {sorted(sizes)}", rule="fold.tensor"
            )
        value = value.repeat(graph.head_size, sizes.pop() // graph.head_size)
    return residual, value


def _config_without_tie(checkpoint: Checkpoint) -> bytes:
    config = {**companion_config(checkpoint.companions, "fold.config"), _TIED: False}
    return (json.dumps(config, indent=2) + "\n").encode()
