"""Tensors of any checkpoint in the places that an ONNX graph has for them, by their names (``spec/onnx.md``)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ingot.artifacts.attachments import no_attachment
from ingot.artifacts.open import Source, open_source
from ingot.codecs.affine.word_rows import rows_tensor
from ingot.codecs.blocks.from_blocks import unpack_blocks
from ingot.codecs.table import CODECS
from ingot.conversion.placement import as_stored
from ingot.core.numeric.dtypes import FLOATS, cast
from ingot.engine.steps import Move, Repack
from ingot.errors import UsageError
from ingot.formats.onnx.facing import EITHER, INPUTS, OUTPUTS, Orientation
from ingot.formats.onnx.format import OnnxFormat
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.affine import ZEROS, AffineLayout, Points
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.ggml import GgmlBlocksLayout
from ingot.model.layouts.packed_ints import PackedIntLayout
from ingot.model.layouts.scaled_codebook import ScaledCodebookLayout
from ingot.model.reading.lazy import LazyMap
from ingot.model.reading.view import View, derive_checkpoint, with_name
from ingot.model.tensor import Tensor
from ingot.naming.names import layer_path, role_of
from ingot.stores.location import AnyPath, Location
from ingot.views.turn import turned_matrix
from ingot.views.turn_bytes import turned_bytes

_BITS = 4
_SHOWN = 20


def into_graph(checkpoint: Checkpoint, path: AnyPath) -> Checkpoint:
    """Return the checkpoint of ``place_in_graph``."""
    return place_in_graph(checkpoint, path).checkpoint


def place_in_graph(checkpoint: Checkpoint, path: AnyPath) -> View:
    """Return the tensors of an ONNX graph, those of the checkpoint in place of its own, and a note on the others.

    Names are those of the graph's constants, with what quantizers append to them or without, or of the operators that
    use them. A matrix of a ``MatMul`` whose integers ``MatMulNBits`` can have takes its place packed. What no tensor
    is there for stays as the graph has it, where that is no weight. Closing the view closes both.

    Raises
    ------
    UsageError
        ``attachments.none``: no ONNX model; ``convert.graph``: tensors and weights of the graph do not fit together;
        each is named.
    """
    location = Location.parse(path)
    source = open_source(location, io="pread")
    try:
        graph = _opened(source, location)
        matched = _Matched(checkpoint, graph, OnnxFormat().for_attachments(graph.attachments))
        makes, said = matched.makes(), [location.text, *source.identity()]
        tensors = LazyMap(makes, lambda name: makes[name].build())
        origins = {name: make.origins for name, make in makes.items()}
        view = derive_checkpoint(
            checkpoint,
            tensors,
            into_graph,
            location.text,
            said,
            origins=origins,
            opened=[source],
            also_close=source.close,
            attachments=replace(checkpoint.attachments, graph=graph.attachments.graph),
            aliases=graph.aliases,
            importance={},
            unread={**checkpoint.unread, **graph.unread},
        )
        return View(view).with_notes(matched.stays())
    except BaseException:
        source.close()
        raise


def _opened(source: Source, location: Location) -> Checkpoint:
    graph = source.view()
    if graph.attachments.graph is None:
        raise no_attachment("graph", location)
    return graph


@dataclass(frozen=True, slots=True)
class GraphTensor:
    """A tensor of the graph: what builds it, and the checkpoint's tensors that it is made of."""

    build: Callable[[], Tensor]
    origins: tuple[str, ...]


class _Matched:
    """Which tensor takes which place; raises ``UsageError`` ``convert.graph``."""

    def __init__(self, checkpoint: Checkpoint, graph: Checkpoint, format: OnnxFormat) -> None:
        self._checkpoint = checkpoint
        self._graph = graph
        self._format = format
        self._wrong: list[str] = []
        self._pairs = list(self._named())
        self._pairs += self._tied()
        taken = {pair.place for pair in self._pairs}
        for name, tensor in graph.items():
            if name not in taken and self._is_weight(name, tensor):
                self._wrong.append(f"{name} {list(tensor.shape)} of the graph has no tensor")
        self._facing = Facing(checkpoint, graph, format, self._pairs)
        for pair in self._pairs:
            self._check(pair)
        if self._wrong:
            more = len(self._wrong) - _SHOWN
            said = "; ".join([*self._wrong[:_SHOWN], *([f"{more} more"] if more > 0 else [])])
            raise UsageError(
                f"expected a place in the graph for each tensor, and a tensor for each of its weights: {said}",
                rule="convert.graph",
                where=graph.location,
            )

    def _keys(self, name: str) -> Iterator[str]:
        yield name
        yield self._format.original_name(name)

    def _named(self) -> Iterator[Pair]:
        places: dict[str, set[str]] = {}
        for place in self._graph:
            local = self._format.local_name(place)
            for key in (*self._keys(place), *self._keys(local), self._graph.aliases.get(place, place)):
                places.setdefault(key, set()).add(place)
        taken: dict[str, str] = {}
        for name in self._checkpoint:
            keys = (*self._keys(name), self._checkpoint.aliases.get(name, name))
            found = {name} if name in self._graph else next((places[key] for key in keys if key in places), set())
            if len(found) != 1:
                self._wrong.append(f"{name} {'has no place' if not found else f'may be {sorted(found)}'}")
                continue
            place = next(iter(found))
            if place in taken:
                self._wrong.append(f"{name} and {taken[place]} have one place, {place}")
                continue
            taken[place] = name
            yield Pair(place, name)

    def _role(self, name: str) -> str:
        role = role_of(name)
        return role if role != "other" else role_of(self._graph.aliases.get(name, name))

    def _is_weight(self, name: str, tensor: Tensor) -> bool:
        """Whether a constant that no tensor is there for would be a weight of another model."""
        if tensor.codec != DenseLayout.codec:
            return True
        return _is_float(tensor) and (self._multiplied(name) or self._role(name) != "other")

    def stays(self) -> str:
        """Return a remark on numbers that stay as the graph has them."""
        taken = {pair.place for pair in self._pairs}
        names = [name for name, tensor in self._graph.items() if name not in taken and _is_float(tensor)]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return f"as the graph has them stay {', '.join(names[:_SHOWN])}{more}" if names else ""

    def _tied(self) -> Iterator[Pair]:
        """The head of a model that has only embeddings is these."""
        taken = {pair.place for pair in self._pairs}
        if any(role_of(name) == "head" for name in self._checkpoint):
            return
        heads = [name for name in self._graph if name not in taken and self._role(name) == "head"]
        embeddings = [name for name in self._checkpoint if role_of(name) == "embedding"]
        if len(heads) == len(embeddings) == 1:
            shapes = sorted(self._graph[heads[0]].shape), sorted(self._checkpoint[embeddings[0]].shape)
            if shapes[0] == shapes[1]:
                yield Pair(heads[0], embeddings[0])

    def _shapes(self, pair: Pair) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self._graph[pair.place].shape, self._checkpoint[pair.tensor].shape

    def _multiplied(self, place: str) -> bool:
        """Whether a matrix may lie in the graph either way round."""
        return self._format.turned_name(place, _BITS) is not None

    def _check(self, pair: Pair) -> None:
        own, other = self._shapes(pair)
        turned = (*own[:-2], *own[-2:][::-1])
        if other not in (own, turned) or (other != own and not self._multiplied(pair.place)):
            self._wrong.append(f"{pair.tensor} is {list(other)}, its place {pair.place} {list(own)}")
            return
        told = self._facing.turned(pair)
        if told is None:
            self._wrong.append(f"{pair.tensor} {list(other)} is square, and nothing tells which way round it lies")
        elif told and not self._multiplied(pair.place):
            self._wrong.append(
                f"{pair.tensor} {list(other)} lies the other way round than the operators of {pair.place} take it"
            )

    def makes(self) -> Mapping[str, GraphTensor]:
        """Return the tensors of the graph by name, in its order."""
        by_place = {pair.place: pair for pair in self._pairs}
        tensors: dict[str, GraphTensor] = {}
        for place in self._graph:
            pair = by_place.get(place)
            if pair is None:
                tensors[place] = GraphTensor(self._own(place), ())
            else:
                name, build = self._made(pair)
                tensors[name] = GraphTensor(build, (pair.tensor,))
        return tensors

    def _own(self, place: str) -> Callable[[], Tensor]:
        return lambda: self._graph[place]

    def _made(self, pair: Pair) -> tuple[str, Callable[[], Tensor]]:
        """Return the name that a tensor has in the graph, and what makes it."""
        place = pair.place
        tensor = self._checkpoint[pair.tensor]
        site = self._graph[pair.place]
        if not self._multiplied(place):
            return place, self._as_codes(tensor, place, site.dtype)
        packs = self._format.is_turned(place)
        dense = self._format.turned_name(place, _BITS) if packs else place
        assert dense is not None
        outputs = bool(self._facing.turned(pair)) != packs
        found = self._packed(tensor, place, site.dtype) if outputs else None
        if found is not None:
            return found.name, lambda: found
        return dense, self._turned(tensor, dense, site.dtype) if outputs else self._as_codes(tensor, dense, site.dtype)

    def _as_codes(self, tensor: Tensor, name: str, dtype: str) -> Callable[[], Tensor]:
        """As the graph takes it where it lies as it does there."""
        return lambda: self._fitting(_codes(tensor, name, dtype)) or with_name(tensor, name)

    def _turned(self, tensor: Tensor, name: str, dtype: str) -> Callable[[], Tensor]:
        """As the graph takes it where it lies the other way round: FP8 with its blocks, all else decoded."""

        def make() -> Tensor:
            found = turned_bytes(tensor)
            return self._fitting(found and _small_floats(found, name, dtype)) or turned_matrix(tensor, name)

        return make

    def _fitting(self, tensor: Tensor | None) -> Tensor | None:
        """Return codes that the graph can have; None where it cannot."""
        return None if tensor is None or as_stored(tensor, self._format, "") is None else tensor

    def _packed(self, tensor: Tensor, place: str, dtype: str) -> Tensor | None:
        """Return the integers of a matrix [outputs, inputs] as ``MatMulNBits`` can have them; None where it cannot."""
        bits = getattr(_affine(tensor), "bits", 0)
        name = place if self._format.is_turned(place) else self._format.turned_name(place, bits)
        found = None if name is None else _integers(tensor, name, dtype)
        if found is None or not isinstance(as_stored(found, self._format, ""), Move | Repack):
            return None
        return found


def _affine(tensor: Tensor) -> AffineLayout | None:
    """Return the layout of a tensor's integers, row by row; None where they are none."""
    found = _integers(tensor, tensor.name, tensor.dtype)
    return None if found is None else AffineLayout.from_tensor(found)


def _integers(tensor: Tensor, name: str, dtype: str) -> Tensor | None:
    """Return a tensor's integers as values of ``dtype``; None where they are none, or have zero points between them."""
    found: Tensor | None = tensor if tensor.codec == AffineLayout.codec else None
    if tensor.codec in CODECS:
        CODECS[tensor.codec].check(tensor)
    if tensor.codec == PackedIntLayout.codec and not PackedIntLayout.from_tensor(tensor).scattered:
        found = rows_tensor(tensor, PackedIntLayout.from_tensor(tensor))
    elif tensor.codec == GgmlBlocksLayout.codec:
        found = unpack_blocks(tensor)
    if found is None or found.codec != AffineLayout.codec:
        return None
    layout = AffineLayout.from_tensor(found)
    if isinstance(layout.zero, Points) and not _whole(found, layout):
        return None
    params = replace(layout, dtype=dtype).attributes()
    return replace(found, name=name, dtype=dtype, params=params, decoder=CODECS[found.codec], origin=None)


def _codes(tensor: Tensor, name: str, dtype: str) -> Tensor | None:
    """Return a tensor's integers, or its small floats, as values of ``dtype``; None where it has none."""
    return _integers(tensor, name, dtype) or _small_floats(tensor, name, dtype)


def _small_floats(tensor: Tensor, name: str, dtype: str) -> Tensor | None:
    if tensor.codec != ScaledCodebookLayout.codec:
        return None
    CODECS[tensor.codec].check(tensor)
    layout = ScaledCodebookLayout.from_tensor(tensor)
    made = replace(layout, dtype=dtype) if dtype == "f32" else layout  # products are numbers of f32
    return replace(tensor, name=name, dtype=made.dtype, params=made.attributes(), origin=None)


def _whole(tensor: Tensor, layout: AffineLayout) -> bool:
    """Whether all zero points are codes; reads them."""
    zeros = cast(tensor.parts[ZEROS].array().reshape(-1), "f32")
    low = layout.no_zero
    return bool(((zeros == np.rint(zeros)) & (zeros >= low) & (zeros < low + (1 << layout.bits))).all())


def _is_float(tensor: Tensor) -> bool:
    return tensor.size > 1 and tensor.dtype in FLOATS


_DIGITS = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True)
class Pair:
    """A place of the graph and the tensor that takes it."""

    place: str
    tensor: str


@dataclass(frozen=True, slots=True)
class _Kind:
    """What matrices have in common that the same code makes: the stack of layers, and the word for the array in it."""

    stack: str
    word: str

    @classmethod
    def of(cls, name: str) -> _Kind:
        path = layer_path(name) or ""
        pieces = re.split(r"[./]", name)
        return cls(_DIGITS.sub("*", path), _DIGITS.sub("*", pieces[-1]))


class Facing:
    """The orientation of each tensor that replaces a constant of a graph.

    If a matrix is not square, its shape decides. For a square matrix, the graph's operator states the orientation that
    it expects. The orientation in the checkpoint follows from the tensor's name if only graphs use names of this kind.
    Otherwise it follows from matrices that are not square: those of the same stack of layers, or all matrices if all
    of them are [outputs, inputs]. Heads and embeddings are not compared: they are [outputs, inputs] even if all other
    matrices are [inputs, outputs] (GPT-2). Arrays of modules (``q_proj.weight``) are not compared with other arrays
    (``text_projection``).
    """

    def __init__(self, checkpoint: Checkpoint, graph: Checkpoint, format: OnnxFormat, pairs: Sequence[Pair]) -> None:
        self._checkpoint = checkpoint
        self._graph = graph
        self._format = format
        self._told: dict[_Kind, set[Orientation]] = {}
        for pair in pairs:
            face = self._by_shape(pair)
            if face is not None and role_of(pair.tensor) not in ("head", "embedding"):
                self._told.setdefault(_Kind.of(pair.tensor), set()).add(face)

    def turned(self, pair: Pair) -> bool | None:
        """Whether a tensor has its last two axes the other way round than its place; None where nothing tells.

        Its shape is that of the place, or that with the last two axes changed.
        """
        own = self._graph[pair.place].shape
        other = self._checkpoint[pair.tensor].shape
        if len(own) < 2 or own[-1] != own[-2] or own[-1] <= 1:
            return own != other
        wanted = self._format.face(pair.place)
        graphs_own = self._format.is_own(pair.tensor)
        if wanted == EITHER or (graphs_own and pair.tensor == pair.place):
            return False
        found = (self._format.face(pair.tensor) if graphs_own else None) or self._of_others(pair.tensor)
        return None if wanted is None or found is None else found != wanted

    def _by_shape(self, pair: Pair) -> Orientation | None:
        """Return how a matrix lies in the checkpoint that is not square; None where that does not tell."""
        own = self._graph[pair.place].shape
        other = self._checkpoint[pair.tensor].shape
        if len(own) < 2 or own[-1] == own[-2] or other not in (own, (*own[:-2], own[-1], own[-2])):
            return None
        face = self._format.face(pair.place)
        if face not in (OUTPUTS, INPUTS):
            return None
        return OUTPUTS if (own == other) == (face == OUTPUTS) else INPUTS

    def _of_others(self, name: str) -> Orientation | None:
        """Return how a matrix lies as others tell that are not square; None where they do not, or not the same."""
        kind = _Kind.of(name)
        near = self._told.get(kind, set())
        if len(near) == 1 and role_of(name) not in ("head", "embedding"):
            return next(iter(near))
        every = set[Orientation]().union(*(faces for other, faces in self._told.items() if other.word == kind.word))
        return OUTPUTS if every == {OUTPUTS} else None
