"""A model of which a layer at a time is there, and what is summed of each for a calibration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from ingot.core.extras import require
from ingot.errors import ResourceError
from ingot.runtime.calibration.moments import Sums, Wanted, listening
from ingot.runtime.calibration.skeleton import Layer, Piece, Skeleton
from ingot.runtime.calibration.skeleton_ends import embed_by_rows, head_by_rows
from ingot.runtime.layers.stack import Call, Stack
from ingot.runtime.loading.transformers_packed import Placeholder

Group = dict[str, Wanted]


@dataclass(frozen=True, slots=True)
class Settings:
    """How statistics are taken: with gradients, of moments with at most ``largest`` rows, by which labels."""

    fisher: bool
    largest: int | None
    seed: int
    special: tuple[int, ...] = ()


class Layered:
    """A model of which a layer at a time is there.

    Parameters
    ----------
    skeleton : Skeleton
    settings : Settings

    Attributes
    ----------
    layers : list of Layer
        In the order in which they run.
    head : Placeholder or None
        What the tokens are told by; None in an encoder.
    before, behind : list of Placeholder
        Linear layers outside the stack.
    width : int
        Of the embedding.
    """

    def __init__(self, skeleton: Skeleton, settings: Settings) -> None:
        self.torch = require("torch", "torch")
        self.skeleton, self.settings, model = skeleton, settings, skeleton.model
        lists = [name for name, module in model.named_modules() if isinstance(module, self.torch.nn.ModuleList)]
        outside = skeleton.outside(lists)
        ends = [model.get_input_embeddings(), model.get_output_embeddings()]
        at = {id(site.module): site for site in outside if site.attribute == "weight"}
        self.embedding, self.head = (None if end is None else at.get(id(end)) for end in ends)
        skeleton.fill([site for site in outside if site not in (self.embedding, self.head)])
        linear = [site for site in outside if self._is_linear(site) and site is not self.head]
        if self.embedding is not None:
            embed_by_rows(self.embedding)
        if self.head is not None:
            head_by_rows(self.head)
        probe = self.torch.zeros((1, 2), dtype=self.torch.int64)
        self.stack = Stack(model, probe)
        self.width = int(self.stack.embedded(probe).shape[-1])
        early = self.stack.run_before_layers([site.module for site in linear])
        self.before = [site for site, first in zip(linear, early, strict=True) if first]
        self.behind = [site for site, first in zip(linear, early, strict=True) if not first]
        self.layers = skeleton.layers(self.stack.paths)
        self._calls: dict[tuple[int, ...], Sequence[Call]] = {}

    def _is_linear(self, site: Placeholder) -> bool:
        return isinstance(site.module, self.torch.nn.Linear) and site.attribute == "weight"

    def keep(self) -> None:
        """Have the whole model in memory from now on."""
        self.skeleton.kept = True
        ends = [site for site in (self.embedding, self.head) if site is not None]
        for site in ends:
            del site.module.forward
        self.skeleton.fill(ends)

    def calls(self, shape: tuple[int, int]) -> Sequence[Call]:
        """Return how the layers are called for windows of this shape."""
        if shape not in self._calls:
            with self.torch.enable_grad():
                zeros = self.torch.zeros(*shape, self.width).requires_grad_()
                self._calls[shape] = self.stack.enter(zeros).calls
        return self._calls[shape]

    @contextmanager
    def streaming(self) -> Iterator[Any]:
        """Give the model itself: each layer is loaded when a pass comes to it."""
        with ExitStack() as hooks:
            for layer in self.layers:
                hooks.enter_context(_streamed(self.skeleton, layer))
            yield self.skeleton.model

    def wanted(self, layer: Layer) -> list[Wanted]:
        """Return what is summed of a loaded layer."""
        found = self.skeleton.pieces(layer).values()
        return [self._asked(piece, self._cols(piece)) for pieces in found for piece in pieces]

    def shapes(self, layer: Layer) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return rows and columns of a layer's matrices: those of all tokens, and those of experts."""
        dense, routed = [], []
        for tensor in {site.tensor.name: site.tensor for site in layer.sites}.values():
            if len(tensor.shape) == 2:
                dense.append((tensor.shape[0], tensor.shape[1]))
            elif len(tensor.shape) == 3 and tensor.shape[0] > 1:
                routed += [(tensor.shape[1], tensor.shape[2])] * tensor.shape[0]
        routed += [self.skeleton.checkpoint[name].matrix_shape for name in layer.merged]
        return dense, routed

    def sizes(self, layer: Layer) -> list[int]:
        """Return the bytes of the sums of each matrix of a layer."""
        return [
            self._asked(Piece("", None, 0, rows), cols).nbytes for some in self.shapes(layer) for rows, cols in some
        ]

    def of_head(self) -> Wanted | None:
        """Return what is summed of the head: no G, of as many rows as the vocabulary; None where it is tied."""
        if self.head is None or (self.embedding is not None and self.head.tensor is self.embedding.tensor):
            return None
        rows, cols = self.head.tensor.matrix_shape
        return Wanted(self.head.tensor.name, rows, cols, self._small(cols), False)

    @contextmanager
    def listening_to(self, sites: Sequence[Placeholder], *, fisher: bool) -> Iterator[dict[str, Sums]]:
        """Sum what linear layers outside the stack multiply."""
        wanted = [self._asked(_whole(site), site.tensor.matrix_shape[1]) for site in sites]
        sums = {each.name: Sums(self.torch, each, fisher=fisher) for each in wanted}
        known = addressed({id(site.parameter): [_whole(site)] for site in sites}, [self.skeleton.model])
        with listening(known, sums, fisher=fisher, share=False) if sums else nullcontext():
            yield sums

    def _asked(self, piece: Piece, cols: int) -> Wanted:
        rows = piece.last - piece.first
        fisher = self.settings.fisher and self._small(rows)
        return Wanted(piece.name, rows, cols, self._small(cols), fisher, piece.expert is not None)

    def _cols(self, piece: Piece) -> int:
        return self.skeleton.checkpoint[piece.name.partition(":expert.")[0]].shape[-1]

    def _small(self, size: int) -> bool:
        return self.settings.largest is None or size <= self.settings.largest


def _whole(site: Placeholder) -> Piece:
    return Piece(site.tensor.name, None, 0, site.tensor.matrix_shape[0])


@contextmanager
def _streamed(skeleton: Skeleton, layer: Layer) -> Iterator[None]:
    """Load a layer while its forward runs."""
    own = layer.module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with skeleton.loaded(layer):
            return own(*args, **kwargs)

    layer.module.forward = forward
    try:
        yield
    finally:
        del layer.module.forward


def addressed(pieces: Mapping[int, Sequence[Piece]], modules: Sequence[Any]) -> dict[int, tuple[Any, Sequence[Piece]]]:
    """Return pieces by where their parameters lie in memory."""
    found = {}
    for module in modules:
        for parameter in module.parameters():
            if id(parameter) in pieces and not parameter.is_meta:
                found[parameter.untyped_storage().data_ptr()] = parameter, pieces[id(parameter)]
    return found


def grouped(wanted: Sequence[Wanted], room: int) -> list[Group]:
    """Cut matrices into groups whose sums fit into ``room`` bytes together; ``calibrate.ram`` where one does not."""
    groups: list[Group] = [{}]
    size = 0
    for each in wanted:
        if each.nbytes > room:
            raise ResourceError(
                f"expected room for {each.nbytes >> 20} MiB of second moments beside a layer, found "
                f"{max(room, 0) >> 20} MiB; raise --max-ram, or take --largest, --no-fisher",
                rule="calibrate.ram",
                where=each.name,
            )
        if groups[-1] and size + each.nbytes > room:
            groups.append({})
            size = 0
        groups[-1][each.name] = each
        size += each.nbytes
    return groups
