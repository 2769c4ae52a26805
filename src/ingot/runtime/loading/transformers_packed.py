"""Layers of a model of transformers that stay packed: linear layers and embeddings.

While transformers loads, a parameter on device meta stands for each packed weight: it goes through all renaming and
tying and comes out where its layer is. Then each such layer becomes a packed one; what came out elsewhere is decoded,
and a weight that transformers merged with others is loaded again, decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ingot.codecs.affine.word_rows import rows_tensor
from ingot.codecs.packed import matrix_of, stays_packed
from ingot.codecs.table import CODECS
from ingot.core.border import require
from ingot.errors import IngotError
from ingot.model.layouts.packed_words import WordsLayout
from ingot.model.tensor import Tensor
from ingot.runtime.loading.transformers_weights import PACKED, materialize


@dataclass(frozen=True, slots=True)
class StandIn:
    """Where a stand-in came out: the module, the attribute, and the tensor that is to be there."""

    path: str
    module: Any
    attribute: str
    tensor: Tensor

    @property
    def parameter(self) -> Any:
        return self.module._parameters[self.attribute]


def packable(tensors: Mapping[str, Tensor], *, direct: bool = False) -> set[str]:
    """Return the names of the tensors that a layer can compute from as they are stored, or as rows of what is stored.

    Where ``direct``, only those that the kernels multiply with: the others are decoded anew for every product.
    """
    return {name for name, tensor in tensors.items() if stays_packed(in_rows(tensor), direct=direct)}


def in_rows(tensor: Tensor) -> Tensor:
    """Return integers in the words of GPTQ, AWQ and their like row by row, as layers compute from them: made when they
    are read, in memory of their own. Any other tensor, and words in an order of their own, as it is.

    Raises nothing: what does not keep its codec's rules is found when it is decoded.
    """
    if tensor.codec != WordsLayout.codec or len(tensor.shape) != 2:
        return tensor
    try:
        layout = WordsLayout.of(tensor)
        CODECS[tensor.codec].check(tensor)
        return tensor if layout.scattered else rows_tensor(tensor, layout)
    except IngotError:
        return tensor


def made_bytes(tensors: Mapping[str, Tensor], names: Iterable[str]) -> int:
    """Return the bytes that packed layers take which are made of what is stored; others are the mapped file."""
    return sum(tensors[name].nbytes for name in names if tensors[name].codec == WordsLayout.codec)


@dataclass(frozen=True, slots=True)
class Placed:
    """A model, the names of the tensors that its layers compute from packed, and what still stands for values."""

    model: Any
    packed: set[str]
    streamed: list[StandIn]


def put_packed(
    attempt: Callable[[set[str]], Any],
    packed: set[str],
    dtype: Any,
    device: Any,
    streamed: frozenset[str] = frozenset(),
) -> Placed:
    """Return a model whose layers among the tensors ``packed`` compute from packed weights.

    Parameters
    ----------
    attempt : callable
        Builds the model with stand-ins for the named tensors.
    packed : set of str
    dtype : torch.dtype
        Of what has to be decoded after all.
    device : torch.device
    streamed : set of str
        Tensors whose stand-ins are left, together with those of ``packed`` that no layer computes from; where there
        are none, the latter are decoded.
    """
    names = packed | streamed
    model = attempt(names)
    if not names:
        return Placed(model, set(), [])
    sites = list(stand_ins(model))
    if _lost(model):
        left = {site.tensor.name for site in sites}
        return put_packed(attempt, packed & left, dtype, device, streamed & left)
    shared: dict[int, list[StandIn]] = {}
    for site in sites:
        shared.setdefault(id(site.parameter), []).append(site)
    layers: list[StandIn] = []
    left_out: set[int] = set()
    for key, group in shared.items():
        if group[0].tensor.name in packed and all(_is_linear(site) or _is_embedding(site) for site in group):
            layers += group
        elif streamed:
            left_out.add(key)
        else:
            _decode(group, dtype, device)
    rest = [site for site in sites if id(site.parameter) in left_out]
    _pack(model, layers)
    return Placed(model, {site.tensor.name for site in layers}, rest)


def _lost(model: Any) -> bool:
    """Whether something on device meta is no stand-in any more: transformers merged it with others, or made a buffer
    of it."""
    parameters = any(parameter.is_meta and not hasattr(parameter, PACKED) for parameter in model.parameters())
    return parameters or any(buffer.is_meta for buffer in model.buffers())


def stand_ins(model: Any) -> Iterator[StandIn]:
    """Yield where stand-ins came out in a model, shared ones in each place."""
    for path, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            tensor = getattr(parameter, PACKED, None)
            if tensor is not None:
                yield StandIn(path, module, attribute, tensor)


def _is_linear(site: StandIn) -> bool:
    # A subclass computes something else with its weight.
    return type(site.module) is require("torch", "torch").nn.Linear and bool(site.path)


def _is_embedding(site: StandIn) -> bool:
    module = site.module
    return type(module) is require("torch", "torch").nn.Embedding and module.max_norm is None and bool(site.path)


def _decode(group: list[StandIn], dtype: Any, device: Any) -> None:
    """Replace one stand-in by a decoded parameter, in all its places."""
    parameter = require("torch", "torch").nn.Parameter(materialize(group[0].tensor, dtype, device))
    for site in group:
        site.module._parameters[site.attribute] = parameter


def _pack(model: Any, places: list[StandIn]) -> None:
    layers = require("ingot.runtime.layers.packed_linear", "torch")
    own = {id(site.tensor): in_rows(site.tensor.private()) for site in places}  # tied layers share their codes
    for site in places:  # before the layers, as in the order in which weights are read ahead
        if _is_embedding(site):
            matrix = matrix_of(own[id(site.tensor)])
            layer = layers.PackedEmbedding(matrix, site.module.padding_idx, site.parameter.dtype)
            layers.put_layer(model, site.path, layer.train(site.module.training))
    layers.pack_linears(model, {f"{site.path}.weight": own[id(site.tensor)] for site in places if _is_linear(site)})
