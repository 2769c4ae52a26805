"""Linear layers and embeddings of transformers models that keep their weights packed.

While transformers loads, a parameter on device meta is the placeholder of each packed weight. transformers renames and
ties placeholders as usual. Then each layer that contains a placeholder becomes a packed layer. Placeholders in other
modules are decoded. If transformers merged a placeholder with other weights, the model is built again with that weight
decoded.
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
from ingot.model.layouts.packed_ints import PackedIntLayout
from ingot.model.tensor import Tensor
from ingot.runtime.loading.transformers_weights import PACKED, materialize


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A parameter on device meta that stands for a packed weight in a built model.

    The fields are the module and attribute that hold the parameter, and the tensor that it represents.
    """

    path: str
    module: Any
    attribute: str
    tensor: Tensor

    @property
    def parameter(self) -> Any:
        return self.module._parameters[self.attribute]


def packable(tensors: Mapping[str, Tensor], *, direct: bool = False) -> set[str]:
    """Return the names of the tensors that a layer can multiply by in packed form, possibly after reordering into rows.

    With ``direct``, return only tensors that the kernels multiply by; others are decoded for each product.
    """
    return {name for name, tensor in tensors.items() if stays_packed(in_rows(tensor), direct=direct)}


def in_rows(tensor: Tensor) -> Tensor:
    """Return packed integers in the layout of GPTQ, AWQ and similar formats as rows, which layers compute from.

    The rows are computed when they are read and take memory. A tensor of another codec, or one with reordered columns,
    is returned unchanged. An invalid tensor is returned unchanged too: decoding it raises the error.
    """
    if tensor.codec != PackedIntLayout.codec or len(tensor.shape) != 2:
        return tensor
    try:
        layout = PackedIntLayout.from_tensor(tensor)
        CODECS[tensor.codec].check(tensor)
        return tensor if layout.scattered else rows_tensor(tensor, layout)
    except IngotError:
        return tensor


def repacked_bytes(tensors: Mapping[str, Tensor], names: Iterable[str]) -> int:
    """Return the number of bytes that packed layers allocate for reordered tensors.

    The other tensors stay in the mapped file.
    """
    return sum(tensors[name].nbytes for name in names if tensors[name].codec == PackedIntLayout.codec)


@dataclass(frozen=True, slots=True)
class PackedModel:
    """A built model whose layers use packed weights.

    ``packed`` are the names of tensors that layers keep packed, ``streamed`` the placeholders that have no values yet.
    """

    model: Any
    packed: set[str]
    streamed: list[Placeholder]


def put_packed(
    attempt: Callable[[set[str]], Any],
    packed: set[str],
    dtype: Any,
    device: Any,
    streamed: frozenset[str] = frozenset(),
) -> PackedModel:
    """Return a model whose layers keep the weights named by ``packed`` in packed form.

    Parameters
    ----------
    attempt : callable
        Builds the model with placeholders for the named tensors.
    packed : set of str
    dtype : torch.dtype
        Dtype of the weights that have to be decoded.
    device : torch.device
    streamed : set of str
        Names of tensors whose placeholders stay in the model. If ``streamed`` is not empty, the placeholders of
        ``packed`` tensors from which no layer computes also stay; otherwise these tensors are decoded.
    """
    names = packed | streamed
    model = attempt(names)
    if not names:
        return PackedModel(model, set(), [])
    sites = list(placeholders(model))
    if _lost_placeholder(model):
        remaining = {site.tensor.name for site in sites}
        return put_packed(attempt, packed & remaining, dtype, device, streamed & remaining)
    shared: dict[int, list[Placeholder]] = {}
    for site in sites:
        shared.setdefault(id(site.parameter), []).append(site)
    layers: list[Placeholder] = []
    undecoded_ids: set[int] = set()
    for key, group in shared.items():
        if group[0].tensor.name in packed and all(_is_linear(site) or _is_embedding(site) for site in group):
            layers += group
        elif streamed:
            undecoded_ids.add(key)
        else:
            _decode(group, dtype, device)
    undecoded = [site for site in sites if id(site.parameter) in undecoded_ids]
    _pack(model, layers)
    return PackedModel(model, {site.tensor.name for site in layers}, undecoded)


def _lost_placeholder(model: Any) -> bool:
    """Return whether transformers merged a placeholder with other weights, or made it a buffer."""
    parameters = any(parameter.is_meta and not hasattr(parameter, PACKED) for parameter in model.parameters())
    return parameters or any(buffer.is_meta for buffer in model.buffers())


def placeholders(model: Any) -> Iterator[Placeholder]:
    """Yield the placeholders in a model; a shared placeholder is yielded for each module that contains it."""
    for path, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            tensor = getattr(parameter, PACKED, None)
            if tensor is not None:
                yield Placeholder(path, module, attribute, tensor)


def _is_linear(site: Placeholder) -> bool:
    # A subclass of Linear may compute another function of its weight.
    return type(site.module) is require("torch", "torch").nn.Linear and bool(site.path)


def _is_embedding(site: Placeholder) -> bool:
    module = site.module
    return type(module) is require("torch", "torch").nn.Embedding and module.max_norm is None and bool(site.path)


def _decode(group: list[Placeholder], dtype: Any, device: Any) -> None:
    """Decode the tensor of the placeholders in ``group``, which share it, and assign the parameter to all of their
    modules.
    """
    parameter = require("torch", "torch").nn.Parameter(materialize(group[0].tensor, dtype, device))
    for site in group:
        site.module._parameters[site.attribute] = parameter


def _pack(model: Any, sites: list[Placeholder]) -> None:
    layers = require("ingot.runtime.layers.packed_linear", "torch")
    matrices = {id(site.tensor): in_rows(site.tensor.private()) for site in sites}  # tied layers share their codes
    for site in sites:  # before the layers, as in the order in which weights are read ahead
        if _is_embedding(site):
            matrix = matrix_of(matrices[id(site.tensor)])
            layer = layers.PackedEmbedding(matrix, site.module.padding_idx, site.parameter.dtype)
            layers.put_layer(model, site.path, layer.train(site.module.training))
    layers.pack_linears(model, {f"{site.path}.weight": matrices[id(site.tensor)] for site in sites if _is_linear(site)})
