"""The graph of a model: which streams (vectors between modules) each tensor of a checkpoint reads and writes.

Names are matched with the modules of ``views.folding.families``, and sizes with ``config.json``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ingot.artifacts.companions import companion_config
from ingot.codecs.table import stored_exactly
from ingot.errors import UnsupportedError
from ingot.model.checkpoint import Checkpoint
from ingot.naming.config import CONFIG
from ingot.views.folding.families import HEAD, RESIDUAL, VALUE, WIRINGS, Matrix, Module, Norm, OtherModule, Wiring

_CONFIG = "fold.config"
_MAX_SIZE = 1 << 20
_INDEX = "0|[1-9][0-9]{0,5}"
_FLOATS = ("f32", "f16", "bf16")
WEIGHT = ".weight"
BIAS = ".bias"


@dataclass(frozen=True, slots=True)
class Ends:
    """The streams that one matrix reads and writes.

    The matrix multiplies the stream ``reads``, in which each head occurs ``repeats`` times. ``writes`` divides the rows
    of the matrix into consecutive streams, each with its name and number of rows. An empty name is a stream into which
    nothing is folded.
    """

    reads: str
    writes: tuple[tuple[str, int], ...]
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class Site:
    """A tensor that reads or writes streams, and its role.

    Parameters
    ----------
    role : str
        ``norm`` is a vector that scales the normalized residual stream; its ``ends`` read the norm's output. ``table``
        is an embedding, whose rows are vectors of the stream that its ``ends`` read. ``matrix`` is one matrix, or a
        stack of matrices. ``bias`` is a vector that is added to the stream that its ``ends`` write.
    ends : tuple of Ends
        One entry per matrix in the tensor.
    """

    name: str
    role: str
    ends: tuple[Ends, ...]


@dataclass(slots=True)
class Graph:
    """The sites of a checkpoint, and the streams between them.

    ``head_size`` is the size of a value head, and ``queries_per_value`` the number of query heads that share it.
    ``tied`` is true if the head is the embedding. Three mappings have an entry by stream. ``sizes`` contains its number
    of elements, and ``norms`` the norm whose output it is. ``readers`` contains the matrices that read it, each as a
    site and the index of the matrix in the site.
    ``written`` are the streams that matrices write. ``post_norms`` are norms whose output is added to the residual
    stream.
    """

    wiring: Wiring
    head_size: int
    queries_per_value: int
    tied: bool
    sites: dict[str, Site] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    norms: dict[str, str] = field(default_factory=dict)
    readers: dict[str, list[tuple[Site, int]]] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    post_norms: list[str] = field(default_factory=list)

    @property
    def head(self) -> str:
        return self.wiring.head + WEIGHT

    @property
    def embedding(self) -> str:
        return self.wiring.embedding + WEIGHT

    def head_site(self, checkpoint: Checkpoint) -> Site:
        """Return the site of a new head: the matrix that replaces a head tied to the embedding."""
        return Site(self.head, "matrix", (Ends(HEAD, (("", checkpoint[self.embedding].shape[0]),)),))

    def add(self, site: Site) -> None:
        """Add a site, and record it for the streams that it reads and writes."""
        self.sites[site.name] = site
        if site.role == "norm":
            self.norms[site.ends[0].reads] = site.name
        for index, ends in enumerate(site.ends):
            if site.role == "matrix":
                self.readers.setdefault(ends.reads, []).append((site, index))
            self.written.update(stream for stream, _ in ends.writes)


def graph_of(checkpoint: Checkpoint) -> Graph:
    """Return the dataflow graph of a model, from ``config.json`` and tensor headers.

    Raises
    ------
    UnsupportedError
        ``fold.architecture``: an unsupported model type. ``fold.tensor``: a tensor that models of this type do not
        have, that is missing, or that has another shape. ``fold.packed``: a quantized tensor.
    FormatError
        ``fold.config``: no JSON object.
    """
    config = companion_config(checkpoint.companions, _CONFIG)
    model_type = config.get("model_type")
    wiring = WIRINGS.get(str(model_type))
    if wiring is None:
        problem = (
            f"model type {str(model_type)[:80]!r}"
            if CONFIG in checkpoint.companions
            else f"no {CONFIG} next to the weights"
        )
        raise UnsupportedError(
            f"folding supports models of type {', '.join(WIRINGS)}; found {problem}",
            rule="fold.architecture",
            where=checkpoint.location,
        )
    heads = _count(config, "num_attention_heads")
    shared = _count(config, "num_key_value_heads", heads)
    hidden = _count(config, "hidden_size")
    size = _count(config, "head_dim", hidden // heads)
    if heads % shared:
        raise UnsupportedError(
            f"expected a multiple of {shared} (key-value heads) query heads, found {heads}", rule="fold.tensor"
        )
    tied = bool(config.get("tie_word_embeddings", wiring.tied))
    graph = Graph(wiring, size, heads // shared, tied)
    graph.sizes.update({RESIDUAL: hidden, HEAD: hidden})
    classify = _NameClassifier(wiring)
    for name in checkpoint:
        _add_tensor(graph, checkpoint, name, classify)
    _require_ends(graph, checkpoint)
    return graph


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_SIZE:
        raise UnsupportedError(
            f"expected a number from 1 to {_MAX_SIZE} as {key} in {CONFIG}, found {value!r:.40}", rule="fold.tensor"
        )
    return value


class _NameClassifier:
    """Finds the module of a tensor by the tensor's name."""

    def __init__(self, wiring: Wiring) -> None:
        self._layer = re.compile(rf"{re.escape(wiring.layers)}\.({_INDEX})\.(.+)")
        self._modules = [(re.compile(_pattern(module)), module) for module in wiring.layer]

    def __call__(self, name: str) -> tuple[str, Module, str, str] | None:
        """Return the layer, the module, the expert's index, and the ending (``.weight`` or ``.bias``) of a tensor name.

        Returns None if no module of the model type's layers has a tensor of this name.
        """
        layer = self._layer.fullmatch(name)
        if layer is None:
            return None
        for pattern, module in self._modules:
            match = pattern.fullmatch(layer[2])
            if match is not None:
                return f"{int(layer[1])}.", module, match["expert"] if "#" in module.module else "", match["parameter"]
        return None


def _pattern(module: Module) -> str:
    name = re.escape(module.module).replace(r"\#", f"(?P<expert>{_INDEX})")
    if isinstance(module, OtherModule):
        return f"{name}(?P<parameter>\\..+)"
    if isinstance(module, Matrix) and module.stacked:
        return f"{name}(?P<parameter>)"
    endings = f"{re.escape(WEIGHT)}" if isinstance(module, Norm) else f"{re.escape(WEIGHT)}|{re.escape(BIAS)}"
    return f"{name}(?P<parameter>{endings})"


def _add_tensor(graph: Graph, checkpoint: Checkpoint, name: str, classify: _NameClassifier) -> None:
    shape = checkpoint[name].shape
    wiring = graph.wiring
    if name == graph.embedding:
        _add_site(graph, checkpoint, Site(name, "table", (Ends(RESIDUAL, ()),)), shape)
    elif name == wiring.norm + WEIGHT:
        _add_site(graph, checkpoint, Site(name, "norm", (Ends(HEAD, ()),)), shape)
    elif name == graph.head:
        _add_site(graph, checkpoint, Site(name, "matrix", (Ends(HEAD, (("", shape[0] if shape else 0),)),)), shape)
    elif name == wiring.head + BIAS or name.endswith("rotary_emb.inv_freq"):
        return
    elif (match := classify(name)) is not None:
        layer, module, expert, parameter = match
        if isinstance(module, OtherModule):
            graph.post_norms += [name] if module.post_norm else []
        elif isinstance(module, Norm):
            _add_site(graph, checkpoint, Site(name, "norm", (Ends(layer + module.into, ()),)), shape)
        else:
            _add_site(graph, checkpoint, _matrix(graph, name, module, (layer, expert), shape, parameter), shape)
    else:
        raise _tensor_error(name, "a tensor that models of this type have", "another")


def _matrix(
    graph: Graph, name: str, module: Matrix, position: tuple[str, str], shape: tuple[int, ...], parameter: str
) -> Site:
    layer, expert = position
    bias = parameter == BIAS
    if len(shape) != (3 if module.stacked else 1 if bias else 2) or (shape[0] > _MAX_SIZE and module.stacked):
        raise _tensor_error(name, f"{'three' if module.stacked else 'one' if bias else 'two'} dimensions", list(shape))
    rows = shape[-1] if bias else shape[-2]
    experts = [str(index) for index in range(shape[0])] if module.stacked else [expert]
    repeats = graph.queries_per_value if module.reads == VALUE else 1
    ends = tuple(
        Ends(
            "" if bias else _stream(module.reads, layer, index),
            tuple(
                (_stream(stream, layer, index), size)
                for stream, size in zip(module.writes, _row_sizes(graph, module, rows, name), strict=True)
            ),
            repeats,
        )
        for index in experts
    )
    return Site(name, "bias" if bias else "matrix", ends)


def _stream(stream: str, layer: str, expert: str) -> str:
    if stream in ("", RESIDUAL, HEAD):
        return stream
    return layer + stream.replace("#", str(int(expert)) if expert else "")


def _row_sizes(graph: Graph, module: Matrix, rows: int, name: str) -> tuple[int, ...]:
    """Return the number of rows of each stream that a matrix of ``rows`` rows writes.

    A matrix writes one stream, two streams of equal size, or the three streams queries, keys and values.
    """
    if len(module.writes) == 1:
        return (rows,)
    if len(module.writes) == 2:
        sizes: tuple[int, ...] = (rows // 2, rows // 2)
    else:
        shared = rows // (graph.queries_per_value + 2)
        sizes = (rows - 2 * shared, shared, shared)
    if sum(sizes) != rows or (len(sizes) == 3 and sizes[1] % graph.head_size):
        raise _tensor_error(name, f"rows that split into {len(sizes)} streams of full heads", rows)
    return sizes


def _add_site(graph: Graph, checkpoint: Checkpoint, site: Site, shape: tuple[int, ...]) -> None:
    """Add a site to the graph.

    Raises ``UnsupportedError`` ``fold.packed`` if its tensor is quantized. Raises ``UnsupportedError`` ``fold.tensor``
    if its element type is no float type, or if its shape contradicts the sizes of its streams.
    """
    if not stored_exactly(checkpoint[site.name]):
        raise UnsupportedError(
            "weights must not be quantized, because folding into integers would round them again; found "
            f"{checkpoint[site.name].codec}; fold the original model",
            rule="fold.packed",
            where=site.name,
        )
    if checkpoint[site.name].dtype not in _FLOATS:
        raise _tensor_error(site.name, f"weights in {', '.join(_FLOATS)}", checkpoint[site.name].dtype)
    cols = shape[-1] if shape else 0
    for ends in site.ends:
        if ends.reads:
            _require_size(graph, ends.reads, cols // ends.repeats, site.name)
            if cols % ends.repeats:
                raise _tensor_error(site.name, f"columns of {ends.repeats} heads each", cols)
        for stream, size in ends.writes:
            if stream:
                _require_size(graph, stream, size, site.name)
    graph.add(site)


def _require_size(graph: Graph, stream: str, size: int, name: str) -> None:
    if graph.sizes.setdefault(stream, size) != size or (stream.endswith(VALUE) and size % graph.head_size):
        raise _tensor_error(name, f"{graph.sizes[stream]} elements of the stream {stream!r}", size)


def _require_ends(graph: Graph, checkpoint: Checkpoint) -> None:
    """Raise an error if embedding or final norm is missing, or if a stream has no reader or no writer."""
    for name in (graph.embedding, graph.wiring.norm + WEIGHT):
        if name not in graph.sites:
            raise _tensor_error(name, "this tensor", "none")
    if graph.head not in graph.sites and not graph.tied:
        raise _tensor_error(graph.head, "this tensor, or tie_word_embeddings", "neither")
    for stream in graph.sizes:
        outside = stream in (RESIDUAL, HEAD)
        if not outside and stream not in graph.readers:
            raise _tensor_error(checkpoint.location, f"a matrix that reads the stream {stream!r}", "none")
        if not outside and stream not in graph.norms and stream not in graph.written:
            raise _tensor_error(checkpoint.location, f"a norm or a matrix that writes the stream {stream!r}", "none")


def _tensor_error(location: str, expected: str, value: object) -> UnsupportedError:
    return UnsupportedError(f"expected {expected}, found {value}", rule="fold.tensor", where=location)
