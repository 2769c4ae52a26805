"""Layers of a model of transformers that stay packed: linear layers and embeddings.

While transformers loads, a parameter on device meta stands for each packed weight: it goes through all renaming and
tying and comes out where its layer is. Then each such layer becomes a packed one; what came out elsewhere is decoded,
and a weight that transformers merged with others is loaded again, decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ingot.adapters.transformers_weights import PACKED, materialize
from ingot.codecs.affine.matmul import PackedMatrix, stays_packed
from ingot.core.extras import require
from ingot.model.tensor import Tensor


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a stand-in came out: the module, the attribute, and the tensor that is to be there."""

    path: str
    module: Any
    attribute: str
    tensor: Tensor

    @property
    def parameter(self) -> Any:
        return self.module._parameters[self.attribute]


def packable(tensors: Mapping[str, Tensor], *, direct: bool = False) -> set[str]:
    """Return the names of the tensors that a layer can compute from as they are stored.

    Where ``direct``, only those that the kernels multiply with: the others are decoded anew for every product.
    """
    return {name for name, tensor in tensors.items() if stays_packed(tensor, direct=direct)}


def put_packed(attempt: Callable[[set[str]], Any], packed: set[str], dtype: Any, device: Any) -> tuple[Any, set[str]]:
    """Return a model whose layers among the tensors ``packed`` compute from packed weights, and those tensors' names.

    Parameters
    ----------
    attempt : callable
        Builds the model with the named tensors left packed.
    dtype : torch.dtype
        Of what has to be decoded after all.
    device : torch.device
    """
    model = attempt(packed)
    if not packed:
        return model, set()
    places = list(_stand_ins(model))
    if any(parameter.is_meta and not hasattr(parameter, PACKED) for parameter in model.parameters()):
        return put_packed(attempt, {site.tensor.name for site in places}, dtype, device)
    shared: dict[int, list[_Place]] = {}
    for site in places:
        shared.setdefault(id(site.parameter), []).append(site)
    layers: list[_Place] = []
    for group in shared.values():
        if all(_is_linear(site) or _is_embedding(site) for site in group):
            layers += group
        else:
            _decode(group, dtype, device)
    _pack(model, layers)
    return model, {site.tensor.name for site in layers}


def _stand_ins(model: Any) -> Iterator[_Place]:
    for path, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            tensor = getattr(parameter, PACKED, None)
            if tensor is not None:
                yield _Place(path, module, attribute, tensor)


def _is_linear(site: _Place) -> bool:
    # A subclass computes something else with its weight.
    return type(site.module) is require("torch", "torch").nn.Linear and bool(site.path)


def _is_embedding(site: _Place) -> bool:
    module = site.module
    return type(module) is require("torch", "torch").nn.Embedding and module.max_norm is None and bool(site.path)


def _decode(group: list[_Place], dtype: Any, device: Any) -> None:
    """Replace one stand-in by a decoded parameter, in all its places."""
    parameter = require("torch", "torch").nn.Parameter(materialize(group[0].tensor, dtype, device))
    for site in group:
        site.module._parameters[site.attribute] = parameter


def _pack(model: Any, places: list[_Place]) -> None:
    layers = require("ingot.adapters.packed_linear", "torch")
    own = {id(site.tensor): site.tensor.private() for site in places}  # tied layers share their codes
    layers.pack_linears(model, {f"{site.path}.weight": own[id(site.tensor)] for site in places if _is_linear(site)})
    for site in places:
        if _is_embedding(site):
            matrix = PackedMatrix.of(own[id(site.tensor)])
            layer = layers.PackedEmbedding(matrix, site.module.padding_idx, site.parameter.dtype)
            layers.put_layer(model, site.path, layer.train(site.module.training))
