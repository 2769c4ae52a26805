"""Compare the outputs of a model's layers with the outputs of a reference's layers, token by token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ingot.core.border import require
from ingot.errors import UsageError
from ingot.runtime.loading.transformers_config import EXTRA


@dataclass(frozen=True, slots=True)
class LayerError:
    """The difference between a layer's output y and the reference's output r, averaged over tokens.

    ``cosine`` is <y, r> / (|y| |r|), ``error`` is |y - r| / |r|. Both are computed per token and then averaged. The
    outputs of a few tokens, above all the first, can have norms that are a thousand times larger and would dominate a
    sum.
    """

    layer: str
    cosine: float
    error: float

    def departs(self, threshold: float) -> bool:
        """Return whether the error is above ``threshold`` or NaN."""
        return not self.error <= threshold


def outputs_of(model: Any) -> dict[str, Any]:
    """Return the modules to compare, by name and in order: the embedding, the layers, the head.

    The layers are the items of the longest ``ModuleList`` that is not inside another.
    """
    torch = require("torch", EXTRA)
    lists: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in lists):
            lists[name] = module
    stack = max(lists, key=lambda name: len(lists[name]), default="")
    layers = {f"{stack}.{index}": layer for index, layer in enumerate(lists.get(stack, ()))}
    names = {id(module): name for name, module in model.named_modules()}
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    first, last = ({names[id(end)]: end} if id(end) in names else {} for end in ends)
    return {**first, **layers, **last}


class LayerErrors:
    """Sums of the errors of each layer over batches. The model's outputs for one batch are kept until they are
    compared.
    """

    def __init__(self, model: Any, reference: Any) -> None:
        modules, reference_modules = outputs_of(model), outputs_of(reference)
        if list(modules) != list(reference_modules):
            raise UsageError(
                f"expected a reference with the same layers, found {len(reference_modules)} instead of {len(modules)}; "
                f"first difference: {next(iter(set(reference_modules) ^ set(modules)), 'their order')!r:.80}",
                rule="eval.layers",
            )
        self._model = modules
        self._reference = reference_modules
        self._outputs: dict[str, list[Any]] = {}
        self._sums = {name: [0.0, 0.0] for name in modules}
        self._tokens = dict.fromkeys(modules, 0)

    @contextmanager
    def model_runs(self) -> Iterator[None]:
        """Return a context in which the outputs of the model's pass are stored."""
        self._outputs.clear()
        with _hooked(self._model, lambda name, output: self._outputs.setdefault(name, []).append(output)):
            yield

    @contextmanager
    def reference_runs(self) -> Iterator[None]:
        """Return a context in which the outputs of the reference's pass are compared with the stored outputs."""
        with _hooked(self._reference, self._compare):
            yield
        self._outputs.clear()

    def errors(self) -> list[LayerError]:
        """Return the errors of all layers that ran, in order."""
        return [
            LayerError(name, self._sums[name][0] / count, self._sums[name][1] / count)
            for name, count in self._tokens.items()
            if count
        ]

    def _compare(self, name: str, reference: Any) -> None:
        torch = require("torch", EXTRA)
        outputs = self._outputs.get(name)
        if not outputs:
            return
        output = outputs.pop(0)  # a layer that runs several times is compared in each run
        if output.shape != reference.shape:
            raise UsageError(
                f"expected an output of the reference's shape {list(reference.shape)}, found {list(output.shape)}",
                rule="eval.layers",
                where=name,
            )
        y, r = (values.flatten(0, -2).float() for values in (output.to(reference.device), reference))
        length = torch.linalg.vector_norm(r, dim=-1).cpu()  # on the CPU, because not all devices support f64
        error = torch.linalg.vector_norm(y - r, dim=-1).cpu()
        similarity = torch.nn.functional.cosine_similarity(y, r, dim=-1, eps=1e-30).cpu()
        same = (error == 0).double()  # also true for two zero vectors, whose cosine is undefined
        cosine = torch.where(error == 0, same, similarity.double())
        relative = torch.where(error == 0, 1 - same, error.double() / length.double())
        self._sums[name][0] += float(cosine.sum())
        self._sums[name][1] += float(relative.sum())
        self._tokens[name] += len(r)


@contextmanager
def _hooked(modules: Mapping[str, Any], receive: Any) -> Iterator[None]:
    hooks = [module.register_forward_hook(_output_hook(name, receive)) for name, module in modules.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _output_hook(name: str, receive: Any) -> Any:
    def hook(module: Any, arguments: Any, output: Any) -> None:
        receive(name, output[0] if isinstance(output, tuple) else output)

    return hook


def first_departing(layers: Sequence[LayerError], threshold: float) -> str | None:
    """Return the name of the first layer whose error is above ``threshold``; None if there is none."""
    return next((layer.layer for layer in layers if layer.departs(threshold)), None)


def worst_of_layers(layers: Sequence[LayerError]) -> dict[str, float]:
    """Return the worst value over all layers, keyed by the figure's name in gates; NaN is the worst."""
    errors = [layer.error for layer in layers]
    cosines = [layer.cosine for layer in layers]
    if not layers:
        return {}
    return {
        "layer_error": math.nan if any(map(math.isnan, errors)) else max(errors),
        "layer_cosine": math.nan if any(map(math.isnan, cosines)) else min(cosines),
    }
