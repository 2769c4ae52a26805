"""How far the outputs of a model's layers are from those of a reference, token by token."""

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
    """One layer's output y against the reference's r, as means over tokens.

    ``cosine`` is <y, r> / (|y| |r|), ``error`` is |y - r| / |r|. Of each token first: a few tokens, the first of a
    text above all, have outputs a thousand times as long as the others', and would alone decide of sums over all.
    """

    layer: str
    cosine: float
    error: float

    def departs(self, threshold: float) -> bool:
        """Whether the error is above ``threshold``, or no number."""
        return not self.error <= threshold


def outputs_of(model: Any) -> dict[str, Any]:
    """Return the modules that are compared, by name and in order: the embedding, the layers, the head.

    Layers are the items of the longest list of modules that lies in no other.
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
    """Adds up the errors of each layer, batch by batch: the outputs of one batch are held, of one model."""

    def __init__(self, model: Any, reference: Any) -> None:
        own, wanted = outputs_of(model), outputs_of(reference)
        if list(own) != list(wanted):
            raise UsageError(
                f"expected a reference with the same layers, found {len(wanted)} beside {len(own)}, first "
                f"{next(iter(set(wanted) ^ set(own)), 'in another order')!r:.80} in one of them alone",
                rule="eval.layers",
            )
        self._model, self._reference = own, wanted
        self._outputs: dict[str, list[Any]] = {}
        self._sums = {name: [0.0, 0.0] for name in own}
        self._tokens = dict.fromkeys(own, 0)

    @contextmanager
    def model_runs(self) -> Iterator[None]:
        """Keep the outputs of the model's pass."""
        self._outputs.clear()
        with _hooked(self._model, lambda name, output: self._outputs.setdefault(name, []).append(output)):
            yield

    @contextmanager
    def reference_runs(self) -> Iterator[None]:
        """Compare the outputs of the reference's pass over the same tokens with those that were kept."""
        with _hooked(self._reference, self._compare):
            yield
        self._outputs.clear()

    def errors(self) -> list[LayerError]:
        """Return the errors of all layers, in order; those that never ran are left out."""
        return [
            LayerError(name, self._sums[name][0] / count, self._sums[name][1] / count)
            for name, count in self._tokens.items()
            if count
        ]

    def _compare(self, name: str, wanted: Any) -> None:
        torch = require("torch", EXTRA)
        kept = self._outputs.get(name)
        if not kept:
            return
        output = kept.pop(0)  # a layer that runs several times is compared run by run
        if output.shape != wanted.shape:
            raise UsageError(
                f"expected an output of shape {list(wanted.shape)} as the reference's, found {list(output.shape)}",
                rule="eval.layers",
                where=name,
            )
        y, r = (each.flatten(0, -2).float() for each in (output.to(wanted.device), wanted))
        length, error = torch.linalg.vector_norm(r, dim=-1), torch.linalg.vector_norm(y - r, dim=-1)
        same = (error == 0).double()  # also where both are all zeros, which have no direction
        cosine = torch.where(error == 0, same, torch.nn.functional.cosine_similarity(y, r, dim=-1, eps=1e-30).double())
        relative = torch.where(error == 0, 1 - same, error.double() / length.double())
        self._sums[name][0] += float(cosine.sum())
        self._sums[name][1] += float(relative.sum())
        self._tokens[name] += len(r)


@contextmanager
def _hooked(modules: Mapping[str, Any], take: Any) -> Iterator[None]:
    hooks = [module.register_forward_hook(_taking(name, take)) for name, module in modules.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _taking(name: str, take: Any) -> Any:
    def hook(module: Any, arguments: Any, output: Any) -> None:
        take(name, output[0] if isinstance(output, tuple) else output)

    return hook


def first_departing(layers: Sequence[LayerError], threshold: float) -> str | None:
    """Return the first layer whose error is above ``threshold``; None where none is."""
    return next((each.layer for each in layers if each.departs(threshold)), None)


def of_layers(layers: Sequence[LayerError]) -> dict[str, float]:
    """Return the worst of the layers' figures, by the names of gates; a figure that is no number is the worst."""
    errors, cosines = [each.error for each in layers], [each.cosine for each in layers]
    if not layers:
        return {}
    return {
        "layer_error": math.nan if any(map(math.isnan, errors)) else max(errors),
        "layer_cosine": math.nan if any(map(math.isnan, cosines)) else min(cosines),
    }
