"""A transformers model without weights whose layers are decoded one at a time, for passes in little memory.

transformers builds the model on device meta and shows which parameter each tensor fills. A layer has its weights only
while ``loaded`` is active. Modules outside the layers keep their weights, except embedding and head, whose rows are
decoded on demand (``skeleton_ends``). Weights that transformers merges, such as experts in one stack, are merged by
transformers each time their layer is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ingot.core.border import require
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
class MatrixRows:
    """A matrix of the checkpoint that is a range of rows of a parameter; ``name`` is its name in the statistics."""

    name: str
    expert: int | None
    first: int
    last: int


@dataclass(slots=True)
class Layer:
    """A layer of the model: path, module, placeholders, and names of the tensors that transformers merges."""

    path: str
    module: Any
    sites: list[Placeholder] = field(default_factory=list)
    merged: list[str] = field(default_factory=list)


class MetaModel:
    """A model on device meta, in f32, and the tensors that fill it.

    Parameters
    ----------
    source : ModelSource
        The open checkpoint; it must stay open while this object is used.
    device : torch.device, optional
        The device of the model's values; the CPU by default.

    Attributes
    ----------
    model : PreTrainedModel
    checkpoint : Checkpoint
    device : torch.device
    keeps_layers : bool
        Whether layers stay in the device's memory once they are loaded.
    caches_on_host : bool
        Whether decoded values of layers stay in the host's memory, to be copied to the device.

    Raises
    ------
    IngotError
        The errors of ``load_model``.
    """

    def __init__(self, source: ModelSource, device: Any = None) -> None:
        self._torch = require("torch", EXTRA)
        self.device = self._torch.device("cpu") if device is None else device
        self.checkpoint = source.checkpoint
        self._source = source
        self.keeps_layers = False
        self.caches_on_host = False
        self._on_host: dict[int, Any] = {}
        self._config = read_config(source.folder, len(self.checkpoint), self.checkpoint.format)
        self._model_cls = model_class(self._config, source.folder.location)
        self._merging = merged_names(self._config, self.checkpoint)
        self.model, self._decoded_at_build = self._skeleton()
        if self.device.type != "cpu":
            self.model._apply(lambda values: values if values.is_meta else values.to(self.device))
        self._loaded: dict[str, dict[int, Any]] = {}

    def _skeleton(self) -> tuple[Any, frozenset[str]]:
        """Return the model without weights, and the names of its buffers, which the build decodes."""
        names = frozenset(self.checkpoint)
        model = self._attempt(names)
        with_placeholder = {site.tensor.name for site in placeholders(model)}
        buffers = names - with_placeholder - self._merging
        if buffers:
            model = self._attempt(names - buffers)
        return model, buffers

    def _attempt(self, empty: frozenset[str]) -> Any:
        loading = Loading(self._torch.device("cpu"), set(empty))
        weights = weights_of(self.checkpoint, loading)
        # The eager implementation of experts calls a separate product for each expert.
        options = {"dtype": self._torch.float32, "experts_implementation": "eager"}
        location = self.checkpoint.location
        return build(self._model_cls, self._config, weights, loading, options, strict=True, location=location)

    def outside(self, paths: Sequence[str]) -> list[Placeholder]:
        """Return the placeholders outside all modules at ``paths``."""
        return [site for site in placeholders(self.model) if not any(_inside(site.path, path) for path in paths)]

    def layers(self, paths: Sequence[str]) -> list[Layer]:
        """Return the layers at ``paths``, in this order, each with the placeholders of its tensors."""
        layers = {path: Layer(path, self.model.get_submodule(path)) for path in paths}
        by_prefix: dict[str, Layer] = {}
        for site in placeholders(self.model):
            layer = next((layers[path] for path in paths if _inside(site.path, path)), None)
            if layer is not None:
                layer.sites.append(site)
                prefix = layer_path(site.tensor.name)
                if prefix is not None:
                    by_prefix[prefix] = layer
        with_placeholder = {site.tensor.name for site in placeholders(self.model)}
        for name in sorted(self._merging - with_placeholder - self._decoded_at_build):
            prefix = layer_path(name)
            if prefix is None or prefix not in by_prefix:
                raise UnsupportedError(
                    "expected merged weights to belong to one layer",
                    rule="calibrate.architecture",
                    where=name,
                )
            by_prefix[prefix].merged.append(name)
        return list(layers.values())

    def fill(self, sites: Sequence[Placeholder]) -> None:
        """Decode the tensors of the placeholders ``sites``, and keep the values in the model; shared parameters stay
        shared.
        """
        self._require(_nbytes({site.tensor.name: site.tensor for site in sites}))
        parameters: dict[int, Any] = {}
        for site in sites:
            site.module._parameters[site.attribute] = self._parameter(site, parameters)

    def nbytes(self, layer: Layer) -> int:
        """Return the number of bytes of a layer's weights in f32."""
        tensors = {site.tensor.name: site.tensor for site in layer.sites}
        return _nbytes(tensors | {name: self.checkpoint[name] for name in layer.merged})

    @contextmanager
    def loaded(self, layer: Layer) -> Iterator[None]:
        """Load a layer's weights in this context; drop them afterwards unless ``keeps_layers`` is set."""
        if layer.path in self._loaded:
            yield
            return
        self.checkpoint.require_unchanged()
        before = [(site, site.parameter) for site in layer.sites]
        parameters: dict[int, Any] = {}
        for site in layer.sites:
            site.module._parameters[site.attribute] = self._parameter(site, parameters)
        empty = self._merge(layer)
        if self.keeps_layers:
            self._loaded[layer.path] = parameters
            yield
            return
        try:
            yield
        finally:
            for site, parameter in before:
                site.module._parameters[site.attribute] = parameter
            for module, attribute, parameter in empty:
                module._parameters[attribute] = parameter

    def _parameter(self, site: Placeholder, parameters: dict[int, Any]) -> Any:
        key = id(site.tensor)
        if key not in parameters:
            parameters[key] = self._torch.nn.Parameter(self._values(site.tensor), requires_grad=False)
        return parameters[key]

    def _values(self, tensor: Tensor) -> Any:
        """Return the values of a tensor in f32, on the device."""
        if not self.caches_on_host:
            return materialize(tensor, self._torch.float32, self.device)
        key = id(tensor)
        if key not in self._on_host:
            self._on_host[key] = materialize(tensor, self._torch.float32, self._torch.device("cpu"))
        return self._on_host[key].to(self.device)

    def _merge(self, layer: Layer) -> list[tuple[Any, str, Any]]:
        """Build the parameters of a layer that transformers merges, and assign them; return the parameters that they
        replace.

        The model is built with only the tensors of these parameters.
        """
        if not layer.merged:
            return []
        names = frozenset(self.checkpoint) - self._decoded_at_build - frozenset(layer.merged)
        filled = self._attempt(names).get_submodule(layer.path)
        before = []
        for path, module in layer.module.named_modules():
            for attribute, parameter in list(module._parameters.items()):
                values = filled.get_submodule(path)._parameters[attribute]
                if parameter is not None and parameter.is_meta and values is not None and not values.is_meta:
                    before.append((module, attribute, parameter))
                    module._parameters[attribute] = self._torch.nn.Parameter(
                        values.to(self.device), requires_grad=False
                    )
        return before

    def matrices(self, layer: Layer) -> dict[int, list[MatrixRows]]:
        """Return the checkpoint's matrices in each parameter of a loaded layer, by the parameter's ``id``."""
        matrices: dict[int, list[MatrixRows]] = {}
        for site in layer.sites:
            shape = site.tensor.shape
            excluded = self._torch.nn.modules.conv._ConvNd, self._torch.nn.Embedding
            if (
                tuple(shape) == tuple(site.parameter.shape)
                and len(shape) in (2, 3)
                and not isinstance(site.module, excluded)
            ):
                matrices[id(site.parameter)] = _matrices_of(site.tensor.name, shape)
        site_ids = {id(site.parameter) for site in layer.sites}
        for path, module in layer.module.named_modules():
            for attribute, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in site_ids and parameter.ndim in (2, 3):
                    parameter_path = ".".join(filter(None, (layer.path, path, attribute)))
                    matrices[id(parameter)] = self._merged_matrices(layer, parameter_path, parameter)
        return matrices

    def _merged_matrices(self, layer: Layer, path: str, parameter: Any) -> list[MatrixRows]:
        """Return the checkpoint's matrices that transformers merged into ``parameter``, according to its conversion
        table.

        Return no matrices if their values differ from the parameter's.
        """
        for sources, targets in _converters(self._config):
            if not any(re.search(target, path) for target in targets):
                continue
            matrices = []
            rows: dict[int | None, int] = {}
            for pattern in sources:
                for name in layer.merged:
                    match = pattern.search(name)
                    if match is None:
                        continue
                    expert = int(match[1]) if match.groups() else None
                    first = rows.get(expert, 0)
                    rows[expert] = first + self.checkpoint[name].matrix_shape[0]
                    matrices.append(MatrixRows(name, expert, first, rows[expert]))
            if matrices and self._contains(parameter, matrices[-1]):
                return matrices
        return []

    def _contains(self, parameter: Any, matrix: MatrixRows) -> bool:
        """Return whether a parameter contains the values of a matrix in the expected rows."""
        values = materialize(self.checkpoint[matrix.name], self._torch.float32, self.device)
        rows = parameter if matrix.expert is None else parameter[matrix.expert]
        rows = rows[matrix.first : matrix.last]
        return bool(rows.shape == values.shape and self._torch.equal(rows, values))

    def _require(self, nbytes: int) -> None:
        require_ram(nbytes, "weights outside the layers", "close other programs", location=self.checkpoint.location)


def _matrices_of(name: str, shape: Sequence[int]) -> list[MatrixRows]:
    if len(shape) == 2 or shape[0] == 1:
        return [MatrixRows(name, None if len(shape) == 2 else 0, 0, shape[-2])]
    return [MatrixRows(f"{name}:expert.{expert}", expert, 0, shape[-2]) for expert in range(shape[0])]


def _inside(path: str, outer: str) -> bool:
    return path == outer or path.startswith(f"{outer}.")


def _nbytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(4 * tensor.size for tensor in tensors.values())


def _converters(config: Any) -> list[tuple[list[re.Pattern[str]], list[str]]]:
    """Return transformers' rules for merging tensors of the model type in ``config``.

    A rule has the patterns of stored names, with a group for the expert's number, and the patterns of parameters.
    """
    conversion = require("transformers.conversion_mapping", EXTRA)
    model_types = {getattr(part, "model_type", None) for part in (config, getattr(config, "text_config", None))}
    converters = []
    for model_type in sorted(filter(None, model_types)):
        for step in conversion.get_checkpoint_conversion_mapping(model_type) or ():
            if isinstance(step, conversion.WeightConverter):
                patterns = [
                    re.compile(re.escape(pattern).replace(r"\*", "([0-9]+)")) for pattern in step.source_patterns
                ]
                converters.append((patterns, [re.escape(pattern.strip("^$")) for pattern in step.target_patterns]))
    return converters
