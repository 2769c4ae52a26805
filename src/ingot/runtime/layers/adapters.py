"""Adapters beside the layers of a loaded model: linear layers and embeddings add the product of the factors.

Weights stay as they are, packed or not. Only tensors that a product beside the layer cannot change get new parameters:
fused experts, saved modules, biases. The original parameters are kept and put back when the adapters are exchanged.

Importing this module needs torch (``core.border.require`` names the extra).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ingot.adapters.match import fit, with_prefix
from ingot.adapters.names import name_table, to_model_changes
from ingot.adapters.options import AdapterRef
from ingot.adapters.read import open_adapter
from ingot.adapters.record import Adapter, LowRank
from ingot.adapters.view import Term, Terms, column_norms, row_norms
from ingot.artifacts.open import open as open_checkpoint
from ingot.core.border import bordered
from ingot.errors import IngotError, UnsupportedError
from ingot.model.tensor import Array
from ingot.runtime.arrays.torch import from_numpy, to_numpy
from ingot.runtime.layers.packed_linear import PackedEmbedding, PackedLinear, PackedWeight
from ingot.stores.location import AnyPath

_STATE = "_ingot_adapters"
RULE = "adapter.model"


@dataclass(slots=True)
class _Active:
    """The adapters of a model: their references, the hooks, and the parameters that new ones replaced."""

    references: list[AdapterRef] = field(default_factory=list)
    hooks: list[Any] = field(default_factory=list)
    originals: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = field(default_factory=list)

    def remove(self) -> None:
        """Restore the model."""
        for hook in self.hooks:
            hook.remove()
        for module, name, parameter in self.originals:
            module._parameters[name] = parameter
        self.hooks.clear()
        self.originals.clear()
        self.references.clear()


@bordered
def use_adapters(model: torch.nn.Module, adapters: Sequence[AnyPath | tuple[AnyPath, float] | AdapterRef]) -> None:
    """Exchange the adapters of a loaded model; an empty sequence restores the base exactly.

    Parameters
    ----------
    model : torch.nn.Module
        A model of transformers, from ``ingot.load_model`` or ``from_pretrained``.
    adapters : sequence of path, (path, weight) or "PATH:WEIGHT"
        Their changes are added with their weights.

    Raises
    ------
    UnsupportedError
        ``adapter.base``, ``adapter.shape``: the adapter belongs to another model; ``adapter.model``: a change that
        needs dense values of a packed or streamed layer. The model then has no adapter.
    IngotError
        The errors of ``open_adapter``.
    """
    active: _Active = model.__dict__.setdefault(_STATE, _Active())
    active.remove()
    references = [AdapterRef.parse(item) for item in adapters]
    try:
        with ExitStack() as stack:
            opened = [stack.enter_context(open_adapter(item.path)) for item in references]
            terms = _terms(model, opened, [item.weight for item in references])
            for name, items in terms.items():
                _install(model, name, items, active)
    except BaseException:
        active.remove()
        raise
    active.references.extend(references)


def adapters_of(model: torch.nn.Module) -> list[AdapterRef]:
    """Return the adapters that a model uses."""
    active: _Active | None = model.__dict__.get(_STATE)
    return [] if active is None else list(active.references)


def _terms(model: torch.nn.Module, opened: Sequence[Adapter], weights: Sequence[float]) -> dict[str, list[Term]]:
    shapes = dict(_shapes(model))
    model_type = str(getattr(getattr(model, "config", None), "model_type", ""))
    terms: dict[str, list[Term]] = {}
    for adapter, weight in zip(opened, weights, strict=True):
        changes = adapter.changes if adapter.writer != "gguf" else _model_changes(model, adapter)
        renamed = with_prefix(changes, shapes)
        missing = [name for name in renamed if name not in shapes]
        if missing:
            raise UnsupportedError(
                f"the adapter changes {len(missing)} of {len(renamed)} parameters that the model lacks, such as "
                f"{missing[0][:120]}",
                rule="adapter.base",
                where=adapter.location,
            )
        for name, items in renamed.items():
            fitted = [fit(item, name, shapes[name], adapter, model_type) for item in items]
            terms.setdefault(name, []).append(Term(weight, fitted))
    return terms


def _model_changes(model: torch.nn.Module, adapter: Adapter) -> Any:
    """Return the changes of a GGUF adapter by the model's names, which the base's folder or file determines."""
    path = str(getattr(getattr(model, "config", None), "name_or_path", ""))
    try:
        with open_checkpoint(path) as base:
            return to_model_changes(adapter.changes, name_table(base))
    except IngotError as error:
        raise UnsupportedError(
            f"expected the base of a GGUF adapter at {path[:200]!r}, which determines the order of rows: {error}; "
            "convert the adapter (ingot adapter convert)",
            rule=RULE,
            where=adapter.location,
        ) from None


def _shapes(model: torch.nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of the parameters, those of packed layers included."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, tuple(parameter.shape)
    for name, module in model.named_modules():
        if isinstance(module, PackedWeight):
            yield f"{name}.weight", tuple(module.shape)


def _install(model: torch.nn.Module, name: str, terms: Sequence[Term], active: _Active) -> None:
    path, _, parameter_name = name.rpartition(".")
    module = model.get_submodule(path)
    low_ranks = [item for term in terms for item in term.changes if isinstance(item, LowRank)]
    count = sum(len(term.changes) for term in terms)
    fits_hook = (
        parameter_name == "weight" and len(low_ranks) == count and all(len(item.a.shape) == 2 for item in low_ranks)
    )
    if fits_hook and _is_embedding(module) and not any(item.magnitude for item in low_ranks):
        active.hooks.append(module.register_forward_hook(_embedding_hook(module, terms)))
    elif fits_hook and _is_linear(module):
        active.hooks.append(module.register_forward_hook(_linear_hook(module, name, terms)))
    else:
        _replace_parameter(module, parameter_name, name, terms, active)


def _is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear | PackedLinear) or type(module).__name__ == "Conv1D"


def _is_embedding(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Embedding | PackedEmbedding)


def _tensor(values: Array, device: torch.device) -> torch.Tensor:
    tensor: torch.Tensor = from_numpy(values.copy()).to(device)  # not memory of the adapter's file
    return tensor


def _device(module: torch.nn.Module) -> torch.device:
    """Return the device of a module's values; the CPU for values that are streamed."""
    values = next(iter((*module.parameters(recurse=False), *module.buffers(recurse=False))), None)
    return torch.device("cpu") if values is None or values.is_meta else values.device


def _linear_hook(module: torch.nn.Module, name: str, terms: Sequence[Term]) -> Callable[..., torch.Tensor]:
    """Return a hook that adds ``weight * scale * (x @ a.T) @ b.T`` to the output of a linear layer."""
    device = _device(module)
    factors = []
    for term in terms:
        for item in term.changes:
            assert isinstance(item, LowRank)
            plain = item.plain()
            a = _tensor(plain.a.values(), device)
            b = _tensor(plain.b.values(), device)
            norms = None if item.magnitude is None else _tensor(_dora_factors(module, name, item), device)
            factors.append((a.T, b.T, item.scale, term.weight, norms))

    def hook(module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        x = inputs[0].float()
        result = base = output.float()
        for a, b, scale, weight, norms in factors:
            change = ((x @ a) @ b) * scale
            if norms is not None:
                bias = 0 if module.bias is None else module.bias.float()
                change = (base - bias + change) * norms + bias - base
            result = result + (change if weight == 1 else change * weight)
        return result.to(output.dtype)

    return hook


def _dora_factors(module: torch.nn.Module, name: str, item: LowRank) -> Array:
    """Return the factor of each output: the magnitude over the norm of the changed weight."""
    values = to_numpy(_dense_weight(module, name).float())
    changed = values + (item.b.values() @ item.a.values()) * np.float32(item.scale)
    norms = column_norms(changed) if item.transposed else row_norms(changed)
    assert item.magnitude is not None
    return item.magnitude.values() / norms


def _dense_weight(module: torch.nn.Module, name: str) -> torch.Tensor:
    if isinstance(module, PackedWeight):
        return module.decode(slice(None), torch.float32).cpu()
    weight: torch.Tensor = module._parameters["weight"]  # type: ignore[assignment]
    if weight.is_meta:
        raise UnsupportedError("DoRA needs the weights of the layer, which are streamed", rule=RULE, where=name)
    return weight.detach().cpu()


def _embedding_hook(module: torch.nn.Module, terms: Sequence[Term]) -> Callable[..., torch.Tensor]:
    """Return a hook that adds ``weight * scale * b[ids] @ a`` to the output of an embedding."""
    device = _device(module)
    factors = []
    for term in terms:
        for item in term.changes:
            assert isinstance(item, LowRank)
            scale = term.weight * item.scale
            factors.append((_tensor(item.a.values(), device), _tensor(item.b.values(), device), scale))

    def hook(module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        result = output.float()
        multiplier = getattr(module, "embed_scale", 1.0)  # Gemma scales embeddings
        for a, b, scale in factors:
            result = result + (b[inputs[0]] @ a) * scale * multiplier
        return result.to(output.dtype)

    return hook


def _replace_parameter(
    module: torch.nn.Module, parameter_name: str, name: str, terms: Sequence[Term], active: _Active
) -> None:
    """Put a parameter with merged values in the place of a parameter."""
    original = module._parameters.get(parameter_name)
    if original is None or original.is_meta:
        raise UnsupportedError(
            "the adapter changes this tensor by new values, for which it must be decoded in memory: load the model "
            "without keep_packed and stream",
            rule=RULE,
            where=name,
        )
    merger = Terms(name, tuple(original.shape), terms)
    values = to_numpy(original.detach().float().cpu()).reshape(merger.rows, merger.cols)
    merged = from_numpy(merger.apply(values, 0).reshape(tuple(original.shape)))
    active.originals.append((module, parameter_name, original))
    module._parameters[parameter_name] = torch.nn.Parameter(
        merged.to(original.device, original.dtype), requires_grad=False
    )
