"""Linear layers that stay packed in a model of transformers.

While transformers loads, a parameter on device meta stands for each packed weight: it goes through all renaming and
comes out where its layer is. Then each such layer becomes a ``PackedLinear``; what came out elsewhere (an embedding, a
tied head) is decoded, and a weight that transformers merged with others is loaded again, decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ingot.adapters.transformers_weights import PACKED, materialize
from ingot.core.extras import require
from ingot.model.tensor import Tensor

_BITS = (4, 8)


def packable(tensor: Tensor) -> bool:
    """Whether a tensor can stay packed as the weight of a linear layer, as far as the tensor alone can tell."""
    return tensor.codec == "quantized_group" and len(tensor.shape) == 2 and tensor.params.get("bits") in _BITS


def put_packed(attempt: Callable[[set[str]], Any], packed: set[str], dtype: Any, device: Any) -> tuple[Any, set[str]]:
    """Return a model whose linear layers among the tensors ``packed`` compute from packed weights, and their names.

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
    found = dict(_stand_ins(model))
    if any(parameter.is_meta and not hasattr(parameter, PACKED) for parameter in model.parameters()):
        return put_packed(attempt, {tensor.name for _, tensor in found.values()}, dtype, device)
    linear = require("torch", "torch").nn.Linear
    tied = _tied(model)
    layers = {}
    for name, (module, tensor) in found.items():
        if type(module) is linear and name.endswith(".weight") and name not in tied:
            layers[name] = tensor
    _decode_others(model, set(layers), dtype, device)
    require("ingot.adapters.packed_linear", "torch").pack_linears(model, layers)
    return model, {tensor.name for tensor in layers.values()}


def _stand_ins(model: Any) -> Iterator[tuple[str, tuple[Any, Tensor]]]:
    """Yield every place of a stand-in: its name, the module, and the tensor that it stands for."""
    for path, module in model.named_modules():
        for own, parameter in module._parameters.items():
            tensor = getattr(parameter, PACKED, None)
            if tensor is not None:
                yield (f"{path}.{own}" if path else own), (module, tensor)


def _tied(model: Any) -> set[str]:
    """Return the names whose parameter has another place too: both have to stay one parameter."""
    pairs = dict(getattr(model, "all_tied_weights_keys", None) or {})
    names = {name for pair in pairs.items() for name in pair}
    places: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    return names | {name for group in places.values() if len(group) > 1 for name in group}


def _decode_others(model: Any, packed: set[str], dtype: Any, device: Any) -> None:
    """Replace the stand-ins that are no packed layers by decoded parameters; places that shared one go on sharing."""
    torch = require("torch", "torch")
    made: dict[int, Any] = {}
    for name, (module, tensor) in list(_stand_ins(model)):
        if name in packed:
            continue
        own = name.rpartition(".")[2]
        key = id(module._parameters[own])
        if key not in made:
            made[key] = torch.nn.Parameter(materialize(tensor, dtype, device))
        module._parameters[own] = made[key]
