"""A model of transformers without its weights, which are decoded a layer at a time: for passes in little memory.

transformers builds the model on device meta and says where each tensor of the checkpoint goes. A layer gets its weights
when ``loaded`` begins and gives them back at its end; what lies outside the layers is there throughout, but for the
embedding and the head, which are read by rows (``skeleton_ends``). Weights that transformers merges (experts into one
stack) are merged by its own loading, once per time that their layer is wanted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ingot.core.extras import require
from ingot.core.runtime.memory import require_ram
from ingot.errors import UnsupportedError
from ingot.model.tensor import Tensor
from ingot.naming.names import layer_path
from ingot.runtime.loading.model_source import ModelSource
from ingot.runtime.loading.transformers_build import build
from ingot.runtime.loading.transformers_config import EXTRA, model_class, read_config
from ingot.runtime.loading.transformers_packed import Placeholder, placeholders
from ingot.runtime.loading.transformers_weights import Loading, materialize, merged_names, weights_of


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a parameter that are one matrix of the checkpoint: ``name`` as statistics call it."""

    name: str
    expert: int | None
    first: int
    last: int


@dataclass(slots=True)
class Layer:
    """One item of the list of layers: its path in the model, stand-ins, and the tensors that transformers merges."""

    path: str
    module: Any
    sites: list[Placeholder] = field(default_factory=list)
    merged: list[str] = field(default_factory=list)


class Skeleton:
    """A model on device meta, in f32, and what fills it.

    Parameters
    ----------
    source : ModelSource
        Stays open for as long as the skeleton is used.

    Attributes
    ----------
    model : PreTrainedModel
    checkpoint : Checkpoint
    kept : bool
        Set it to keep layers once they are loaded: where the whole model fits.

    Raises
    ------
    IngotError
        As ``load_model``.
    """

    def __init__(self, source: ModelSource) -> None:
        self._torch = require("torch", EXTRA)
        self.checkpoint, self._source, self.kept = source.checkpoint, source, False
        self._config = read_config(source.folder, len(self.checkpoint), self.checkpoint.format)
        self._kind = model_class(self._config, source.folder.location)
        self._merging = merged_names(self._config, self.checkpoint)
        self.model, self._whole = self._skeleton()
        self._loaded: dict[str, dict[int, Any]] = {}

    def _skeleton(self) -> tuple[Any, frozenset[str]]:
        """Return the model, and the tensors that have to be decoded as it is built: those that become buffers."""
        names = frozenset(self.checkpoint)
        model = self._attempt(names)
        found = {site.tensor.name for site in placeholders(model)}
        others = names - found - self._merging
        if others:
            model = self._attempt(names - others)
        return model, others

    def _attempt(self, empty: frozenset[str]) -> Any:
        loading = Loading(self._torch.device("cpu"), set(empty))
        weights = weights_of(self.checkpoint, loading)
        # One way to compute experts, whose products can be told apart.
        options = {"dtype": self._torch.float32, "experts_implementation": "eager"}
        location = self.checkpoint.location
        return build(self._kind, self._config, weights, loading, options, strict=True, location=location)

    def outside(self, paths: Sequence[str]) -> list[Placeholder]:
        """Return the stand-ins that lie in none of the modules at ``paths``."""
        return [site for site in placeholders(self.model) if not any(_inside(site.path, path) for path in paths)]

    def layers(self, paths: Sequence[str]) -> list[Layer]:
        """Return what each layer is filled from, in the order of their paths in the model."""
        found = {path: Layer(path, self.model.get_submodule(path)) for path in paths}
        places: dict[str, Layer] = {}
        for site in placeholders(self.model):
            layer = next((found[path] for path in paths if _inside(site.path, path)), None)
            if layer is not None:
                layer.sites.append(site)
                prefix = layer_path(site.tensor.name)
                if prefix is not None:
                    places[prefix] = layer
        stood = {site.tensor.name for site in placeholders(self.model)}
        for name in sorted(self._merging - stood - self._whole):
            prefix = layer_path(name)
            if prefix is None or prefix not in places:
                raise UnsupportedError(
                    "expected weights that are merged within one layer alone",
                    rule="calibrate.architecture",
                    where=name,
                )
            places[prefix].merged.append(name)
        return list(found.values())

    def fill(self, sites: Sequence[Placeholder]) -> None:
        """Decode what stays: shared parameters stay shared."""
        self._require(_nbytes({site.tensor.name: site.tensor for site in sites}))
        made: dict[int, Any] = {}
        for site in sites:
            site.module._parameters[site.attribute] = self._made(site, made)

    def nbytes(self, layer: Layer) -> int:
        """Return the bytes of a layer in f32."""
        tensors = {site.tensor.name: site.tensor for site in layer.sites}
        return _nbytes(tensors | {name: self.checkpoint[name] for name in layer.merged})

    @contextmanager
    def loaded(self, layer: Layer) -> Iterator[None]:
        """Give a layer its weights; it loses them again at the end where the skeleton does not keep them."""
        if layer.path in self._loaded:
            yield
            return
        self.checkpoint.require_unchanged()
        before = [(site, site.parameter) for site in layer.sites]
        made: dict[int, Any] = {}
        for site in layer.sites:
            site.module._parameters[site.attribute] = self._made(site, made)
        empty = self._merge(layer)
        if self.kept:
            self._loaded[layer.path] = made
            yield
            return
        try:
            yield
        finally:
            for site, parameter in before:
                site.module._parameters[site.attribute] = parameter
            for module, attribute, parameter in empty:
                module._parameters[attribute] = parameter

    def _made(self, site: Placeholder, made: dict[int, Any]) -> Any:
        key = id(site.tensor)
        if key not in made:
            values = materialize(site.tensor, self._torch.float32, self._torch.device("cpu"))
            made[key] = self._torch.nn.Parameter(values, requires_grad=False)
        return made[key]

    def _merge(self, layer: Layer) -> list[tuple[Any, str, Any]]:
        """Put merged parameters into a layer, from a loading of their tensors alone; return what was there."""
        if not layer.merged:
            return []
        names = frozenset(self.checkpoint) - self._whole - frozenset(layer.merged)
        filled = self._attempt(names).get_submodule(layer.path)
        before = []
        for path, module in layer.module.named_modules():
            for attribute, parameter in list(module._parameters.items()):
                values = filled.get_submodule(path)._parameters[attribute]
                if parameter is not None and parameter.is_meta and values is not None and not values.is_meta:
                    before.append((module, attribute, parameter))
                    module._parameters[attribute] = values.requires_grad_(False)
        return before

    def pieces(self, layer: Layer) -> dict[int, list[Piece]]:
        """Return which matrices of the checkpoint each parameter of a loaded layer holds, by the parameter's id."""
        found = {}
        for site in layer.sites:
            shape = site.tensor.shape
            kinds = self._torch.nn.modules.conv._ConvNd, self._torch.nn.Embedding
            if (
                tuple(shape) == tuple(site.parameter.shape)
                and len(shape) in (2, 3)
                and not isinstance(site.module, kinds)
            ):
                found[id(site.parameter)] = _stacked(site.tensor.name, shape)
        stood = {id(site.parameter) for site in layer.sites}
        for path, module in layer.module.named_modules():
            for attribute, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in stood and parameter.ndim in (2, 3):
                    place = ".".join(filter(None, (layer.path, path, attribute)))
                    found[id(parameter)] = self._merged_pieces(layer, place, parameter)
        return found

    def _merged_pieces(self, layer: Layer, path: str, parameter: Any) -> list[Piece]:
        """Return what transformers merged into a parameter, as its table of conversions says; none if values differ."""
        for sources, targets in _converters(self._config):
            if not any(re.search(target, path) for target in targets):
                continue
            pieces = []
            rows: dict[int | None, int] = {}
            for pattern in sources:
                for name in layer.merged:
                    match = pattern.search(name)
                    if match is None:
                        continue
                    expert = int(match[1]) if match.groups() else None
                    first = rows.get(expert, 0)
                    rows[expert] = first + self.checkpoint[name].matrix_shape[0]
                    pieces.append(Piece(name, expert, first, rows[expert]))
            if pieces and self._holds(parameter, pieces[-1]):
                return pieces
        return []

    def _holds(self, parameter: Any, piece: Piece) -> bool:
        """Whether a matrix of the checkpoint lies where it is thought to lie."""
        values = materialize(self.checkpoint[piece.name], self._torch.float32, self._torch.device("cpu"))
        there = parameter if piece.expert is None else parameter[piece.expert]
        there = there[piece.first : piece.last]
        return bool(there.shape == values.shape and self._torch.equal(there, values))

    def _require(self, nbytes: int) -> None:
        require_ram(nbytes, "weights outside the layers", "close other programs", where=self.checkpoint.location)


def _stacked(name: str, shape: Sequence[int]) -> list[Piece]:
    if len(shape) == 2 or shape[0] == 1:
        return [Piece(name, None if len(shape) == 2 else 0, 0, shape[-2])]
    return [Piece(f"{name}:expert.{number}", number, 0, shape[-2]) for number in range(shape[0])]


def _inside(path: str, outer: str) -> bool:
    return path == outer or path.startswith(f"{outer}.")


def _nbytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(4 * tensor.size for tensor in tensors.values())


def _converters(config: Any) -> list[tuple[list[re.Pattern[str]], list[str]]]:
    """Return transformers' own table: patterns of stored names, whose number is a group, and of the parameters."""
    known = require("transformers.conversion_mapping", EXTRA)
    kinds = {getattr(part, "model_type", None) for part in (config, getattr(config, "text_config", None))}
    found = []
    for kind in sorted(filter(None, kinds)):
        for step in known.get_checkpoint_conversion_mapping(kind) or ():
            if isinstance(step, known.WeightConverter):
                patterns = [re.compile(re.escape(each).replace(r"\*", "([0-9]+)")) for each in step.source_patterns]
                found.append((patterns, [re.escape(each.strip("^$")) for each in step.target_patterns]))
    return found
