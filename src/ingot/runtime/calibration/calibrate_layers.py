"""A model that loads its layers one at a time, and the specs of the moments to sum for each layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from ingot.core.border import require
from ingot.errors import ResourceError
from ingot.runtime.calibration.moments import MomentSpec, Sums, record_products
from ingot.runtime.calibration.skeleton import Layer, MatrixRows, MetaModel
from ingot.runtime.calibration.skeleton_ends import embed_by_rows, head_by_rows, read_rows
from ingot.runtime.layers.stack import Call, Stack
from ingot.runtime.loading.transformers_packed import Placeholder

Group = dict[str, MomentSpec]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the statistics.

    ``fisher`` states whether gradients are computed. For a matrix with more than ``largest`` columns or rows, only the
    diagonal of a moment is summed. ``seed`` is the seed of drawn labels. ``special`` contains the ids of special
    tokens.
    """

    fisher: bool
    largest: int | None
    seed: int
    special: tuple[int, ...] = ()


class LayerwiseModel:
    """A model that loads its layers one at a time.

    Parameters
    ----------
    skeleton : MetaModel
    settings : Settings

    Attributes
    ----------
    layers : list of Layer
        The layers in the order in which they run.
    head : Placeholder or None
        The output embedding; None in an encoder.
    before, after : list of Placeholder
        Linear layers outside the stack that run before and after it.
    width : int
        Width of the embedding.
    device : torch.device
        The device on which layers compute.
    """

    def __init__(self, skeleton: MetaModel, settings: Settings) -> None:
        self.torch = require("torch", "torch")
        self.skeleton = skeleton
        self.settings = settings
        model = skeleton.model
        lists = [name for name, module in model.named_modules() if isinstance(module, self.torch.nn.ModuleList)]
        outside = skeleton.outside(lists)
        ends = [model.get_input_embeddings(), model.get_output_embeddings()]
        sites = {id(site.module): site for site in outside if site.attribute == "weight"}
        self.embedding, self.head = (None if end is None else sites.get(id(end)) for end in ends)
        skeleton.fill([site for site in outside if site not in (self.embedding, self.head)])
        linear = [site for site in outside if self._is_linear(site) and site is not self.head]
        if self.embedding is not None:
            embed_by_rows(self.embedding)
        if self.head is not None:
            head_by_rows(self.head)
        self.device = skeleton.device
        probe = self.torch.zeros((1, 2), dtype=self.torch.int64, device=self.device)
        self.stack = Stack(model, probe)
        self.width = int(self.stack.embedded(probe).shape[-1])
        early = self.stack.run_before_layers([site.module for site in linear])
        self.before = [site for site, first in zip(linear, early, strict=True) if first]
        self.after = [site for site, first in zip(linear, early, strict=True) if not first]
        self.layers = skeleton.layers(self.stack.paths)
        self._calls: dict[tuple[int, ...], Sequence[Call]] = {}

    def _is_linear(self, site: Placeholder) -> bool:
        return isinstance(site.module, self.torch.nn.Linear) and site.attribute == "weight"

    def keep(self) -> None:
        """Load the complete model into the device's memory, and keep it there."""
        self.skeleton.keeps_layers = True
        ends = [site for site in (self.embedding, self.head) if site is not None]
        for site in ends:
            del site.module.forward
        self.skeleton.fill(ends)

    def calls(self, shape: tuple[int, int]) -> Sequence[Call]:
        """Return the arguments with which each layer is called for windows of ``shape`` (windows, length)."""
        if shape not in self._calls:
            with self.torch.enable_grad():
                zeros = self.torch.zeros(*shape, self.width, device=self.device).requires_grad_()
                self._calls[shape] = self.stack.enter(zeros).calls
        return self._calls[shape]

    @contextmanager
    def streaming(self) -> Iterator[Any]:
        """Yield the model; each layer loads its weights when a pass reaches it."""
        with ExitStack() as hooks:
            for layer in self.layers:
                hooks.enter_context(_streamed(self.skeleton, layer))
            yield self.skeleton.model

    def moment_specs(self, layer: Layer) -> list[MomentSpec]:
        """Return the moments to sum for each matrix of a loaded layer."""
        matrices = self.skeleton.matrices(layer).values()
        return [self._spec(matrix, self._cols(matrix)) for group in matrices for matrix in group]

    def shapes(self, layer: Layer) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return the shapes of a layer's matrices that all tokens use, and the shapes of its experts' matrices."""
        dense = []
        routed = []
        for tensor in {site.tensor.name: site.tensor for site in layer.sites}.values():
            if len(tensor.shape) == 2:
                dense.append((tensor.shape[0], tensor.shape[1]))
            elif len(tensor.shape) == 3 and tensor.shape[0] > 1:
                routed += [(tensor.shape[1], tensor.shape[2])] * tensor.shape[0]
        routed += [self.skeleton.checkpoint[name].matrix_shape for name in layer.merged]
        return dense, routed

    def sizes(self, layer: Layer) -> list[int]:
        """Return for each matrix of a layer the number of bytes of its moments."""
        return [
            self._spec(MatrixRows("", None, 0, rows), cols).nbytes
            for shapes in self.shapes(layer)
            for rows, cols in shapes
        ]

    def head_spec(self) -> MomentSpec | None:
        """Return the moments to sum for the head; None if the model has no head.

        Moments of a tied head have the name of the embedding. G is not summed, because it would be as large as the
        vocabulary squared.
        """
        if self.head is None:
            return None
        rows, cols = self.head.tensor.matrix_shape
        return MomentSpec(self.head.tensor.name, rows, cols, self._is_summed_in_full(cols), False)

    def embedding_spec(self) -> MomentSpec | None:
        """Return the spec of the moment to sum for the embedding.

        Returns None if the model has no embedding, or if the embedding is not a matrix with ``width`` columns. Also
        returns None if ``width`` is above the limit for full moments.
        """
        if self.embedding is None:
            return None
        shape = self.embedding.tensor.shape
        if len(shape) != 2 or shape[1] != self.width or not self._is_summed_in_full(self.width):
            return None
        return MomentSpec(self.embedding.tensor.name, shape[0], shape[1], True, False)

    def embedding_scale(self, tokens: Any) -> float:
        """Return the factor by which the model multiplies rows of the embedding; above 1 in Gemma."""
        assert self.embedding is not None
        values = self.stack.embedded(tokens.to(self.device)).detach().flatten(0, -2).cpu()
        rows = read_rows(self.torch, self.embedding.tensor, tokens.flatten())
        squares = float((rows * rows).sum(dtype=self.torch.float64))
        return float((values * rows).sum(dtype=self.torch.float64)) / squares if squares else 1.0

    @contextmanager
    def listening_to(self, sites: Sequence[Placeholder], *, fisher: bool) -> Iterator[dict[str, Sums]]:
        """Sum moments of ``sites``, linear layers outside the decoder layers, while this context is active.

        Yields the sums by name.
        """
        specs = [self._spec(_all_rows(site), site.tensor.matrix_shape[1]) for site in sites]
        sums = {spec.name: Sums(self.torch, spec, fisher=fisher, device=self.device) for spec in specs}
        parameters = by_address({id(site.parameter): [_all_rows(site)] for site in sites}, [self.skeleton.model])
        with record_products(parameters, sums, fisher=fisher, share=False) if sums else nullcontext():
            yield sums

    def _spec(self, matrix: MatrixRows, cols: int) -> MomentSpec:
        rows = matrix.last - matrix.first
        fisher = self.settings.fisher and self._is_summed_in_full(rows)
        return MomentSpec(matrix.name, rows, cols, self._is_summed_in_full(cols), fisher, matrix.expert is not None)

    def _cols(self, matrix: MatrixRows) -> int:
        return self.skeleton.checkpoint[matrix.name.partition(":expert.")[0]].shape[-1]

    def _is_summed_in_full(self, size: int) -> bool:
        return self.settings.largest is None or size <= self.settings.largest


def _all_rows(site: Placeholder) -> MatrixRows:
    return MatrixRows(site.tensor.name, None, 0, site.tensor.matrix_shape[0])


@contextmanager
def _streamed(skeleton: MetaModel, layer: Layer) -> Iterator[None]:
    """Load a layer's weights when its forward pass begins, and drop them when it ends, while this context is active."""
    original = layer.module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with skeleton.loaded(layer):
            return original(*args, **kwargs)

    layer.module.forward = forward
    try:
        yield
    finally:
        del layer.module.forward


def by_address(
    matrices: Mapping[int, Sequence[MatrixRows]], modules: Sequence[Any]
) -> dict[int, tuple[Any, Sequence[MatrixRows]]]:
    """Return the parameters of ``modules`` that contain matrices, each with its matrices.

    Keys are addresses of the parameters' memory.
    """
    addresses = {}
    for module in modules:
        for parameter in module.parameters():
            if id(parameter) in matrices and not parameter.is_meta:
                addresses[parameter.untyped_storage().data_ptr()] = parameter, matrices[id(parameter)]
    return addresses


def group_by_size(specs: Sequence[MomentSpec], max_bytes: int) -> list[Group]:
    """Split matrices into groups whose moments fit into ``max_bytes`` together.

    Raises ``ResourceError`` ``calibrate.ram`` if a single matrix does not fit.
    """
    groups: list[Group] = [{}]
    size = 0
    for spec in specs:
        if spec.nbytes > max_bytes:
            raise ResourceError(
                f"expected memory for {spec.nbytes >> 20} MiB of second moments besides a layer, found "
                f"{max(max_bytes, 0) >> 20} MiB; raise --max-ram, or use --largest, --no-fisher",
                rule="calibrate.ram",
                where=spec.name,
            )
        if groups[-1] and size + spec.nbytes > max_bytes:
            groups.append({})
            size = 0
        groups[-1][spec.name] = spec
        size += spec.nbytes
    return groups
