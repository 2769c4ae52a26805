"""Replace the constants of an ONNX graph by tensors of any checkpoint, matched by name (``spec/onnx.md``)."""

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
from ingot.conversion.placement import plan_exact
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
from ingot.views.transpose import transpose_matrix
from ingot.views.transpose_fp8 import transpose_fp8

_BITS = 4
_MAX_LISTED = 20  # the maximum number of names or faults in a message


def into_graph(checkpoint: Checkpoint, path: AnyPath) -> Checkpoint:
    """Return the checkpoint of ``place_in_graph``, without the note."""
    return place_in_graph(checkpoint, path).checkpoint


def place_in_graph(checkpoint: Checkpoint, path: AnyPath) -> View:
    """Return the constants of an ONNX graph, replaced by tensors of a checkpoint, and a note on constants that stay.

    A tensor replaces the constant that has its name, or its name with a suffix that quantization tools add, or the
    constant of the operator that has its name. A matrix of a ``MatMul`` stays packed if ``MatMulNBits`` supports its
    integers. Constants without a tensor keep their values, unless they are weights. Closing the view closes both
    checkpoints.

    Raises
    ------
    UsageError
        ``attachments.none``: no ONNX model; ``convert.graph``: tensors and weights of the graph do not match.
        The message lists them.
    """
    location = Location.parse(path)
    source = open_source(location, io="pread")
    try:
        graph = _graph_of(source, location)
        matched = _MatchedGraph(checkpoint, graph, OnnxFormat().for_attachments(graph.attachments))
        replacements = matched.tensors()
        identity = [location.text, *source.identity()]
        tensors = LazyMap(replacements, lambda name: replacements[name].build())
        origins = {name: replacement.origins for name, replacement in replacements.items()}
        view = derive_checkpoint(
            checkpoint,
            tensors,
            into_graph,
            location.text,
            identity,
            origins=origins,
            opened=[source],
            also_close=source.close,
            attachments=replace(checkpoint.attachments, graph=graph.attachments.graph),
            aliases=graph.aliases,
            importance={},
            unread={**checkpoint.unread, **graph.unread},
        )
        return View(view).with_notes(matched.unreplaced_note())
    except BaseException:
        source.close()
        raise


def _graph_of(source: Source, location: Location) -> Checkpoint:
    """Return the checkpoint of an ONNX model; raise ``attachments.none`` for another source."""
    graph = source.view()
    if graph.attachments.graph is None:
        raise no_attachment("graph", location)
    return graph


@dataclass(frozen=True, slots=True)
class GraphTensor:
    """A tensor of the graph: the function that builds it, and the tensors of the checkpoint from which it is built."""

    build: Callable[[], Tensor]
    origins: tuple[str, ...]


class _MatchedGraph:
    """A graph whose constants are matched with tensors; raises ``UsageError`` ``convert.graph`` if they do not fit."""

    def __init__(self, checkpoint: Checkpoint, graph: Checkpoint, format: OnnxFormat) -> None:
        self._checkpoint = checkpoint
        self._graph = graph
        self._format = format
        self._faults: list[str] = []
        self._pairs = list(self._pairs_by_name())
        self._pairs += self._tied_pairs()
        matched = {pair.constant for pair in self._pairs}
        for name, tensor in graph.items():
            if name not in matched and self._is_weight(name, tensor):
                self._faults.append(f"{name} {list(tensor.shape)} of the graph has no tensor")
        self._orientations = OrientationResolver(checkpoint, graph, format, self._pairs)
        for pair in self._pairs:
            self._check(pair)
        if self._faults:
            more = len(self._faults) - _MAX_LISTED
            faults = "; ".join([*self._faults[:_MAX_LISTED], *([f"{more} more"] if more > 0 else [])])
            raise UsageError(
                f"expected a constant of the graph for each tensor, and a tensor for each of its weights: {faults}",
                rule="convert.graph",
                where=graph.location,
            )

    def _keys(self, name: str) -> Iterator[str]:
        yield name
        yield self._format.original_name(name)

    def _pairs_by_name(self) -> Iterator[Pair]:
        """Yield the pairs of constants and tensors with matching names.

        Records a fault for a tensor that does not match exactly one constant.
        """
        constants_by_key: dict[str, set[str]] = {}
        for constant in self._graph:
            local = self._format.local_name(constant)
            for key in (*self._keys(constant), *self._keys(local), self._graph.aliases.get(constant, constant)):
                constants_by_key.setdefault(key, set()).add(constant)
        matched: dict[str, str] = {}
        for name in self._checkpoint:
            candidates = {name}
            if name not in self._graph:
                keys = (*self._keys(name), self._checkpoint.aliases.get(name, name))
                candidates = next((constants_by_key[key] for key in keys if key in constants_by_key), set())
            if len(candidates) != 1:
                fault = f"may replace {sorted(candidates)}" if candidates else "has no constant in the graph"
                self._faults.append(f"{name} {fault}")
                continue
            constant = next(iter(candidates))
            if constant in matched:
                self._faults.append(f"{name} and {matched[constant]} match the same constant, {constant}")
                continue
            matched[constant] = name
            yield Pair(constant, name)

    def _role(self, name: str) -> str:
        role = role_of(name)
        return role if role != "other" else role_of(self._graph.aliases.get(name, name))

    def _is_weight(self, name: str, tensor: Tensor) -> bool:
        """Return whether a constant is a weight, so that the result needs a tensor for it."""
        if tensor.codec != DenseLayout.codec:
            return True
        return _is_float(tensor) and (self._multiplied(name) or self._role(name) != "other")

    def unreplaced_note(self) -> str:
        """Return a note on floating-point constants that keep the values of the graph; empty if there are none."""
        matched = {pair.constant for pair in self._pairs}
        names = [name for name, tensor in self._graph.items() if name not in matched and _is_float(tensor)]
        more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
        return f"constants that keep the values of the graph: {', '.join(names[:_MAX_LISTED])}{more}" if names else ""

    def _tied_pairs(self) -> Iterator[Pair]:
        """Yield the graph's head paired with the checkpoint's embeddings, if the checkpoint has no head."""
        matched = {pair.constant for pair in self._pairs}
        if any(role_of(name) == "head" for name in self._checkpoint):
            return
        heads = [name for name in self._graph if name not in matched and self._role(name) == "head"]
        embeddings = [name for name in self._checkpoint if role_of(name) == "embedding"]
        if len(heads) == len(embeddings) == 1:
            shapes = sorted(self._graph[heads[0]].shape), sorted(self._checkpoint[embeddings[0]].shape)
            if shapes[0] == shapes[1]:
                yield Pair(heads[0], embeddings[0])

    def _shapes(self, pair: Pair) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self._graph[pair.constant].shape, self._checkpoint[pair.tensor].shape

    def _multiplied(self, constant: str) -> bool:
        """Return whether a constant is the matrix of a ``MatMul``; the graph may also store it transposed."""
        return self._format.turned_name(constant, _BITS) is not None

    def _check(self, pair: Pair) -> None:
        """Record a fault if the shape or the orientation of a tensor does not fit its constant."""
        expected, shape = self._shapes(pair)
        transposed = (*expected[:-2], *expected[-2:][::-1])
        if shape not in (expected, transposed) or (shape != expected and not self._multiplied(pair.constant)):
            self._faults.append(
                f"{pair.tensor} has the shape {list(shape)}, its constant {pair.constant} {list(expected)}"
            )
            return
        is_transposed = self._orientations.is_transposed(pair)
        if is_transposed is None:
            self._faults.append(f"{pair.tensor} {list(shape)} is square, and its orientation cannot be determined")
        elif is_transposed and not self._multiplied(pair.constant):
            self._faults.append(
                f"{pair.tensor} {list(shape)} is the transpose of the matrix that the operators of {pair.constant} need"
            )

    def tensors(self) -> Mapping[str, GraphTensor]:
        """Return the tensors of the graph, keyed by name, in the order of the graph."""
        pairs = {pair.constant: pair for pair in self._pairs}
        tensors: dict[str, GraphTensor] = {}
        for constant in self._graph:
            pair = pairs.get(constant)
            if pair is None:
                tensors[constant] = GraphTensor(self._unreplaced(constant), ())
            else:
                name, build = self._replacement(pair)
                tensors[name] = GraphTensor(build, (pair.tensor,))
        return tensors

    def _unreplaced(self, constant: str) -> Callable[[], Tensor]:
        return lambda: self._graph[constant]

    def _replacement(self, pair: Pair) -> tuple[str, Callable[[], Tensor]]:
        """Return the name of a constant's replacement in the graph, and the function that builds it."""
        constant = pair.constant
        tensor = self._checkpoint[pair.tensor]
        site = self._graph[constant]
        if not self._multiplied(constant):
            return constant, self._untransposed(tensor, constant, site.dtype)
        is_packed = self._format.is_turned(constant)
        dense = self._format.turned_name(constant, _BITS) if is_packed else constant
        assert dense is not None
        outputs_first = bool(self._orientations.is_transposed(pair)) != is_packed
        if not outputs_first:
            return dense, self._untransposed(tensor, dense, site.dtype)
        packed = self._packed(tensor, constant, site.dtype)
        if packed is not None:
            return packed.name, lambda: packed
        return dense, self._transposed(tensor, dense, site.dtype)

    def _untransposed(self, tensor: Tensor, name: str, dtype: str) -> Callable[[], Tensor]:
        """Return a function that builds a tensor in its present orientation.

        It builds packed codes if the graph supports them, else the tensor unchanged.
        """
        return lambda: self._if_accepted(_codes(tensor, name, dtype)) or with_name(tensor, name)

    def _transposed(self, tensor: Tensor, name: str, dtype: str) -> Callable[[], Tensor]:
        """Return a function that builds the transpose of a tensor.

        FP8 numbers with scales per block stay as they are; any other tensor is decoded.
        """

        def build() -> Tensor:
            transposed = transpose_fp8(tensor)
            accepted = self._if_accepted(transposed and _small_floats(transposed, name, dtype))
            return accepted or transpose_matrix(tensor, name)

        return build

    def _if_accepted(self, tensor: Tensor | None) -> Tensor | None:
        """Return the tensor if the graph can store it exactly; else None."""
        return None if tensor is None or plan_exact(tensor, self._format, "") is None else tensor

    def _packed(self, tensor: Tensor, constant: str, dtype: str) -> Tensor | None:
        """Return the integers of a matrix [outputs, inputs] as ``MatMulNBits`` takes them.

        Returns None if the operator does not support them.
        """
        bits = getattr(_affine(tensor), "bits", 0)
        name = constant if self._format.is_turned(constant) else self._format.turned_name(constant, bits)
        integers = None if name is None else _integers(tensor, name, dtype)
        if integers is None or not isinstance(plan_exact(integers, self._format, ""), Move | Repack):
            return None
        return integers


def _affine(tensor: Tensor) -> AffineLayout | None:
    """Return the row-wise layout of a tensor's integers; None if it has no integers."""
    integers = _integers(tensor, tensor.name, tensor.dtype)
    return None if integers is None else AffineLayout.from_tensor(integers)


def _integers(tensor: Tensor, name: str, dtype: str) -> Tensor | None:
    """Return a tensor's integers, whose decoded values have the type ``dtype``.

    Returns None if the tensor has no integers, or if a zero point is not an integer.
    """
    integers: Tensor | None = tensor if tensor.codec == AffineLayout.codec else None
    if tensor.codec in CODECS:
        CODECS[tensor.codec].check(tensor)
    if tensor.codec == PackedIntLayout.codec and not PackedIntLayout.from_tensor(tensor).scattered:
        integers = rows_tensor(tensor, PackedIntLayout.from_tensor(tensor))
    elif tensor.codec == GgmlBlocksLayout.codec:
        integers = unpack_blocks(tensor)
    if integers is None or integers.codec != AffineLayout.codec:
        return None
    layout = AffineLayout.from_tensor(integers)
    if isinstance(layout.zero, Points) and not _has_integer_zeros(integers, layout):
        return None
    params = replace(layout, dtype=dtype).attributes()
    return replace(integers, name=name, dtype=dtype, params=params, decoder=CODECS[integers.codec], origin=None)


def _codes(tensor: Tensor, name: str, dtype: str) -> Tensor | None:
    """Return a tensor's integers or small floats, whose decoded values have the type ``dtype``.

    Returns None if the tensor has neither.
    """
    return _integers(tensor, name, dtype) or _small_floats(tensor, name, dtype)


def _small_floats(tensor: Tensor, name: str, dtype: str) -> Tensor | None:
    if tensor.codec != ScaledCodebookLayout.codec:
        return None
    CODECS[tensor.codec].check(tensor)
    layout = ScaledCodebookLayout.from_tensor(tensor)
    if dtype == "f32":  # in f32, the products of codes and scales are exact
        layout = replace(layout, dtype=dtype)
    return replace(tensor, name=name, dtype=layout.dtype, params=layout.attributes(), origin=None)


def _has_integer_zeros(tensor: Tensor, layout: AffineLayout) -> bool:
    """Return whether all zero points are codes; reads the zero points."""
    zeros = cast(tensor.parts[ZEROS].array().reshape(-1), "f32")
    low = layout.no_zero
    return bool(((zeros == np.rint(zeros)) & (zeros >= low) & (zeros < low + (1 << layout.bits))).all())


def _is_float(tensor: Tensor) -> bool:
    return tensor.size > 1 and tensor.dtype in FLOATS


_DIGITS = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True)
class Pair:
    """A constant of the graph and the tensor that replaces it."""

    constant: str
    tensor: str


@dataclass(frozen=True, slots=True)
class _NamePattern:
    """A matrix name as a pattern with ``*`` for numbers: the path of its layer, and its last component."""

    layer: str
    component: str

    @classmethod
    def from_name(cls, name: str) -> _NamePattern:
        layer = layer_path(name) or ""
        component = re.split(r"[./]", name)[-1]
        return cls(_DIGITS.sub("*", layer), _DIGITS.sub("*", component))


class OrientationResolver:
    """A resolver of the orientation of tensors that replace constants of a graph.

    If a matrix is not square, its shape decides. For a square matrix, the operator of the graph determines the expected
    orientation. The orientation in the checkpoint follows from the tensor's name if only graphs use names of this kind.
    Otherwise it is the orientation of matrices with similar names that are not square: of the same stack of layers, or
    of all layers if all of these are [outputs, inputs]. Heads and embeddings are not compared: they are [outputs,
    inputs] even if all other matrices are [inputs, outputs] (GPT-2). Arrays of modules (``q_proj.weight``) are not
    compared with other arrays (``text_projection``).
    """

    def __init__(self, checkpoint: Checkpoint, graph: Checkpoint, format: OnnxFormat, pairs: Sequence[Pair]) -> None:
        self._checkpoint = checkpoint
        self._graph = graph
        self._format = format
        self._known_orientations: dict[_NamePattern, set[Orientation]] = {}
        for pair in pairs:
            orientation = self._by_shape(pair)
            if orientation is not None and role_of(pair.tensor) not in ("head", "embedding"):
                pattern = _NamePattern.from_name(pair.tensor)
                self._known_orientations.setdefault(pattern, set()).add(orientation)

    def is_transposed(self, pair: Pair) -> bool | None:
        """Return whether a tensor is the transpose of its constant; None if it cannot be determined.

        The tensor has the shape of the constant, or the transposed shape.
        """
        expected = self._graph[pair.constant].shape
        shape = self._checkpoint[pair.tensor].shape
        if len(expected) < 2 or expected[-1] != expected[-2] or expected[-1] <= 1:
            return expected != shape
        required = self._format.face(pair.constant)
        has_graph_name = self._format.is_own(pair.tensor)
        if required == EITHER or (has_graph_name and pair.tensor == pair.constant):
            return False
        orientation = (self._format.face(pair.tensor) if has_graph_name else None) or self._by_name(pair.tensor)
        return None if required is None or orientation is None else orientation != required

    def _by_shape(self, pair: Pair) -> Orientation | None:
        """Return the orientation of a matrix in the checkpoint if its shape determines it; else None."""
        expected = self._graph[pair.constant].shape
        shape = self._checkpoint[pair.tensor].shape
        transposed = (*expected[:-2], *expected[-2:][::-1])
        if len(expected) < 2 or expected[-1] == expected[-2] or shape not in (expected, transposed):
            return None
        required = self._format.face(pair.constant)
        if required not in (OUTPUTS, INPUTS):
            return None
        return OUTPUTS if (expected == shape) == (required == OUTPUTS) else INPUTS

    def _by_name(self, name: str) -> Orientation | None:
        """Return the orientation of the square matrix ``name``; None if it cannot be determined.

        It is the orientation of matrices with similar names, if these have the same orientation.
        """
        pattern = _NamePattern.from_name(name)
        similar = self._known_orientations.get(pattern, set())
        if len(similar) == 1 and role_of(name) not in ("head", "embedding"):
            return next(iter(similar))
        same_component = set[Orientation]().union(
            *(
                orientations
                for key, orientations in self._known_orientations.items()
                if key.component == pattern.component
            )
        )
        return OUTPUTS if same_component == {OUTPUTS} else None
