"""Use adapters in a loaded model without changing its weights.

Hooks add the product of an adapter's factors to the output of a linear layer or embedding.

Weights stay as they are, packed or not. Only tensors whose change a hook cannot express get new parameters: fused
experts, saved modules, biases. The original parameters are restored when the adapters are exchanged.

Importing this module needs torch (``core.border.require`` names the extra).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from ingot.adapters.match import fit, with_prefix
from ingot.adapters.names import name_table, to_model_changes
from ingot.adapters.options import AdapterRef
from ingot.adapters.read import open_adapter
from ingot.adapters.record import Adapter, Change, LowRank
from ingot.adapters.view import Term, Terms
from ingot.artifacts.open import open as open_checkpoint
from ingot.core.border import bordered
from ingot.errors import IngotError, UnsupportedError
from ingot.runtime.arrays.torch import from_numpy, to_numpy
from ingot.runtime.layers.adapter_cache import CachedAdapter, Product, WeightState, cache_of, file_stamps, value_count
from ingot.runtime.layers.packed_linear import PackedEmbedding, PackedLinear, PackedWeight
from ingot.stores.location import AnyPath

_STATE = "_ingot_adapters"
RULE = "adapter.model"


@dataclass(slots=True)
class _Active:
    """The adapters that a model uses: their references, their hooks, and the original parameters that were replaced."""

    references: list[AdapterRef] = field(default_factory=list)
    hooks: list[Any] = field(default_factory=list)
    originals: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = field(default_factory=list)

    def remove(self) -> None:
        """Remove the hooks, and put the original parameters back."""
        for hook in self.hooks:
            hook.remove()
        for module, name, parameter in self.originals:
            module._parameters[name] = parameter
        self.hooks.clear()
        self.originals.clear()
        self.references.clear()


@bordered
def use_adapters(model: torch.nn.Module, adapters: Sequence[AnyPath | tuple[AnyPath, float] | AdapterRef]) -> None:
    """Replace the adapters of a loaded model; an empty sequence removes them and restores the base exactly.

    The factors of an adapter stay in memory after its first use in the model. They are released if one of its files
    changes, if the model is deleted, or by ``clear_adapter_cache``.

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
    CodecError
        ``adapter.values``: a factor has NaN or infinities. The model then has no adapter.
    IngotError
        The errors of ``open_adapter``.
    """
    active: _Active = model.__dict__.setdefault(_STATE, _Active())
    active.remove()
    references = [AdapterRef.parse(item) for item in adapters]
    if not references:
        return
    try:
        with ExitStack() as stack:
            _Exchange(model, references, active, stack).install()
    except BaseException:
        active.remove()
        raise
    active.references.extend(references)


def adapters_of(model: torch.nn.Module) -> list[AdapterRef]:
    """Return the adapters that a model uses."""
    active: _Active | None = model.__dict__.get(_STATE)
    return [] if active is None else list(active.references)


class _Exchange:
    """The installation of adapters in a model. The files of an adapter are opened only if the cache does not contain
    it.
    """

    def __init__(
        self, model: torch.nn.Module, references: Sequence[AdapterRef], active: _Active, stack: ExitStack
    ) -> None:
        self._model = model
        self._references = references
        self._active = active
        self._stack = stack
        self._shapes = dict(_shapes(model))
        self._cache = cache_of(model)
        self._opened: dict[str, dict[str, list[Change]]] = {}

    def install(self) -> None:
        """Add hooks to layers, and replace the parameters that hooks cannot change."""
        self._cache.require_shapes(self._shapes)
        adapters = [self._adapter(item.path) for item in self._references]
        names = dict.fromkeys(name for adapter in adapters for name in adapter.products)
        for name in names:
            path, _, parameter_name = name.rpartition(".")
            module = self._model.get_submodule(path)
            weighted: list[tuple[Product, float]] = []
            members = [
                (reference, adapter)
                for reference, adapter in zip(self._references, adapters, strict=True)
                if name in adapter.products
            ]
            for reference, adapter in members:
                weighted += [(product, reference.weight) for product in adapter.products[name] or ()]
            if any(adapter.products[name] is None for _, adapter in members):
                self._replace(module, parameter_name, name, members)
            else:
                hook = _embedding_hook if _is_embedding(module) else _linear_hook
                self._active.hooks.append(module.register_forward_hook(hook(module, name, weighted)))

    def _adapter(self, path: str) -> CachedAdapter:
        """Return the products of an adapter; read its files if the cache does not contain it."""
        stamps = file_stamps(path)
        adapter = self._cache.adapter(path, stamps)
        if adapter is None:
            changes = self._changes(path)
            products = {name: self._products(name, items) for name, items in changes.items()}
            adapter = CachedAdapter(stamps, products, {name: value_count(items) for name, items in changes.items()})
            if file_stamps(path) == stamps:
                self._cache.add(path, adapter)
        return adapter

    def _products(self, name: str, changes: Sequence[Change]) -> list[Product] | None:
        path, _, parameter_name = name.rpartition(".")
        module = self._model.get_submodule(path)
        low_ranks = [item for item in changes if isinstance(item, LowRank) and len(item.a.shape) == 2]
        if parameter_name != "weight" or len(low_ranks) != len(changes):
            return None
        if _is_linear(module) or (_is_embedding(module) and not any(item.magnitude for item in low_ranks)):
            return [Product(item) for item in low_ranks]
        return None

    def _changes(self, path: str) -> dict[str, list[Change]]:
        """Return the changes of an adapter by the model's names; its files stay open until the exchange ends."""
        if path not in self._opened:
            adapter = self._stack.enter_context(open_adapter(path))
            self._opened[path] = _fitted_changes(self._model, self._shapes, adapter)
        return self._opened[path]

    def _replace(
        self,
        module: torch.nn.Module,
        parameter_name: str,
        name: str,
        members: Sequence[tuple[AdapterRef, CachedAdapter]],
    ) -> None:
        """Replace a parameter of ``module`` by one to which the changes of the adapters are added.

        The new parameter is cached if the adapters store at least as many values as it has.
        """
        original = module._parameters.get(parameter_name)
        if original is None or original.is_meta:
            raise UnsupportedError(
                "the adapter changes this tensor by new values, for which it must be decoded in memory: load the model "
                "without keep_packed and stream",
                rule=RULE,
                where=name,
            )
        key = (name, tuple((reference.path, adapter.stamps, reference.weight) for reference, adapter in members))
        state = WeightState.read([original])
        cached_state, merged = self._cache.merged.get(key, (None, None))
        if merged is None or state is None or state != cached_state:
            terms = [Term(reference.weight, self._changes(reference.path)[name]) for reference, _ in members]
            merged = _merged_parameter(original, name, terms)
            if state is not None and sum(adapter.sizes[name] for _, adapter in members) >= original.numel():
                self._cache.merged[key] = (state, merged)
        self._active.originals.append((module, parameter_name, original))
        module._parameters[parameter_name] = merged


def _fitted_changes(
    model: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]], adapter: Adapter
) -> dict[str, list[Change]]:
    """Return the changes of an adapter by the model's names, in the orientation of its parameters."""
    model_type = str(getattr(getattr(model, "config", None), "model_type", ""))
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
    return {
        name: [fit(item, name, shapes[name], adapter, model_type) for item in items] for name, items in renamed.items()
    }


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
    """Yield the names and shapes of the parameters, including the weights of packed layers."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, tuple(parameter.shape)
    for name, module in model.named_modules():
        if isinstance(module, PackedWeight):
            yield f"{name}.weight", tuple(module.shape)


def _is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear | PackedLinear) or type(module).__name__ == "Conv1D"


def _is_embedding(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Embedding | PackedEmbedding)


def _device(module: torch.nn.Module) -> torch.device:
    """Return the device of a module's values; the CPU for values that are streamed."""
    values = next(iter((*module.parameters(recurse=False), *module.buffers(recurse=False))), None)
    return torch.device("cpu") if values is None or values.is_meta else values.device


def _linear_hook(
    module: torch.nn.Module, name: str, products: Sequence[tuple[Product, float]]
) -> Callable[..., torch.Tensor]:
    """Return a hook that adds ``weight * scale * (x @ a.T) @ b.T`` to the output of a linear layer."""
    device = _device(module)
    factors = []
    for product, weight in products:
        norms = product.norm_factors(module, lambda: _dense_weight(module, name))
        on_device = None if norms is None else norms.to(device)
        factors.append((product.a.to(device).T, product.b.to(device).T, product.scale, weight, on_device))

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


def _dense_weight(module: torch.nn.Module, name: str) -> torch.Tensor:
    if isinstance(module, PackedWeight):
        return module.decode(slice(None), torch.float32).cpu()
    weight: torch.Tensor = module._parameters["weight"]  # type: ignore[assignment]
    if weight.is_meta:
        raise UnsupportedError("DoRA needs the weights of the layer, which are streamed", rule=RULE, where=name)
    return weight.detach().cpu()


def _embedding_hook(
    module: torch.nn.Module, name: str, products: Sequence[tuple[Product, float]]
) -> Callable[..., torch.Tensor]:
    """Return a hook that adds ``weight * scale * b[ids] @ a`` to the output of an embedding."""
    device = _device(module)
    factors = [(item.a.to(device), item.b.to(device), weight * item.scale) for item, weight in products]

    def hook(module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        result = output.float()
        multiplier = getattr(module, "embed_scale", 1.0)  # Gemma scales embeddings
        for a, b, scale in factors:
            result = result + (b[inputs[0]] @ a) * scale * multiplier
        return result.to(output.dtype)

    return hook


def _merged_parameter(original: torch.nn.Parameter, name: str, terms: Sequence[Term]) -> torch.nn.Parameter:
    """Return a new parameter with the merged values."""
    merger = Terms(name, tuple(original.shape), terms)
    values = to_numpy(original.detach().float().cpu()).reshape(merger.rows, merger.cols)
    merged = from_numpy(merger.apply(values, 0).reshape(tuple(original.shape)))
    return torch.nn.Parameter(merged.to(original.device, original.dtype), requires_grad=False)
