"""What multiplies what in one checkpoint: its tensors found in the table of families, their sizes compared."""

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
from ingot.views.folding.families import HEAD, RESIDUAL, VALUE, WIRINGS, Aside, Matrix, Module, Norm, Wiring

_CONFIG = "fold.config"
_MOST = 1 << 20
_NUMBER = "0|[1-9][0-9]{0,5}"
_FLOATS = ("f32", "f16", "bf16")
WEIGHT = ".weight"
BIAS = ".bias"


@dataclass(frozen=True, slots=True)
class Ends:
    """One matrix: the stream of its columns, ``times`` each block of it, and the streams of its rows with their sizes.

    An empty name is a stream that nothing is folded into.
    """

    reads: str
    writes: tuple[tuple[str, int], ...]
    times: int = 1


@dataclass(frozen=True, slots=True)
class Site:
    """A tensor among the streams.

    Parameters
    ----------
    kind : str
        ``norm``: a vector that multiplies ``RESIDUAL``, normed, into the stream that ``ends`` reads. ``table``: its
        rows are vectors of the stream that it reads. ``matrix``; ``bias``, a vector of what it writes.
    ends : tuple of Ends
        One for each matrix that lies in the tensor.
    """

    name: str
    kind: str
    ends: tuple[Ends, ...]


@dataclass(slots=True)
class Graph:
    """The sites of a checkpoint.

    ``head_size`` is of a value head, ``times`` the query heads that share one. ``tied``: the head is the embedding.
    By stream: ``sizes``, ``norms`` it comes out of, ``readers``, the sites whose matrix of that number multiplies it.
    ``written`` are those that matrices put out, ``behind`` norms between matrices and the residual stream.
    """

    wiring: Wiring
    head_size: int
    times: int
    tied: bool
    sites: dict[str, Site] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    norms: dict[str, str] = field(default_factory=dict)
    readers: dict[str, list[tuple[Site, int]]] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    behind: list[str] = field(default_factory=list)

    @property
    def head(self) -> str:
        return self.wiring.head + WEIGHT

    @property
    def embedding(self) -> str:
        return self.wiring.embedding + WEIGHT

    def head_site(self, checkpoint: Checkpoint) -> Site:
        """Return the site of a head that is the embedding so far."""
        return Site(self.head, "matrix", (Ends(HEAD, (("", checkpoint[self.embedding].shape[0]),)),))

    def add(self, site: Site) -> None:
        """Take a site in."""
        self.sites[site.name] = site
        if site.kind == "norm":
            self.norms[site.ends[0].reads] = site.name
        for number, ends in enumerate(site.ends):
            if site.kind == "matrix":
                self.readers.setdefault(ends.reads, []).append((site, number))
            self.written.update(stream for stream, _ in ends.writes)


def graph_of(checkpoint: Checkpoint) -> Graph:
    """Return what multiplies what in a model; reads ``config.json`` and no weights.

    Raises
    ------
    UnsupportedError
        ``fold.architecture``: of this model type it is not known; ``fold.tensor``: a tensor that such a model has not,
        misses or has in another shape; ``fold.packed``: a tensor that is quantized already.
    FormatError
        ``fold.config``: no JSON object.
    """
    config = companion_config(checkpoint.companions, _CONFIG)
    kind = config.get("model_type")
    wiring = WIRINGS.get(str(kind))
    if wiring is None:
        found = (
            f"model type {str(kind)[:80]!r}" if CONFIG in checkpoint.companions else f"no {CONFIG} beside the weights"
        )
        raise UnsupportedError(
            f"expected a model of type {', '.join(WIRINGS)}, of which it is known what multiplies what; found {found}",
            rule="fold.architecture",
            where=checkpoint.location,
        )
    heads = _count(config, "num_attention_heads")
    shared = _count(config, "num_key_value_heads", heads)
    hidden = _count(config, "hidden_size")
    size = _count(config, "head_dim", hidden // heads)
    if heads % shared:
        raise UnsupportedError(
            f"expected query heads in equal numbers for {shared} key-value heads, found {heads}", rule="fold.tensor"
        )
    tied = bool(config.get("tie_word_embeddings", wiring.tied))
    graph = Graph(wiring, size, heads // shared, tied)
    graph.sizes.update({RESIDUAL: hidden, HEAD: hidden})
    named = _Named(wiring)
    for name in checkpoint:
        _place(graph, checkpoint, name, named)
    _require_ends(graph, checkpoint)
    return graph


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
        raise UnsupportedError(
            f"expected a number from 1 to {_MOST} as {key} in {CONFIG}, found {value!r:.40}", rule="fold.tensor"
        )
    return value


class _Named:
    """Modules by the names of their tensors."""

    def __init__(self, wiring: Wiring) -> None:
        self._layer = re.compile(rf"{re.escape(wiring.layers)}\.({_NUMBER})\.(.+)")
        self._modules = [(re.compile(_pattern(module)), module) for module in wiring.layer]

    def __call__(self, name: str) -> tuple[str, Module, str, str] | None:
        """Return the layer, the module, the number of an expert, and ``.weight`` or ``.bias``; None for another."""
        layer = self._layer.fullmatch(name)
        if layer is None:
            return None
        for pattern, module in self._modules:
            match = pattern.fullmatch(layer[2])
            if match is not None:
                return f"{int(layer[1])}.", module, match["expert"] if "#" in module.module else "", match["parameter"]
        return None


def _pattern(module: Module) -> str:
    name = re.escape(module.module).replace(r"\#", f"(?P<expert>{_NUMBER})")
    if isinstance(module, Aside):
        return f"{name}(?P<parameter>\\..+)"
    if isinstance(module, Matrix) and module.stacked:
        return f"{name}(?P<parameter>)"
    endings = f"{re.escape(WEIGHT)}" if isinstance(module, Norm) else f"{re.escape(WEIGHT)}|{re.escape(BIAS)}"
    return f"{name}(?P<parameter>{endings})"


def _place(graph: Graph, checkpoint: Checkpoint, name: str, named: _Named) -> None:
    shape = checkpoint[name].shape
    wiring = graph.wiring
    if name == graph.embedding:
        _add(graph, checkpoint, Site(name, "table", (Ends(RESIDUAL, ()),)), shape)
    elif name == wiring.norm + WEIGHT:
        _add(graph, checkpoint, Site(name, "norm", (Ends(HEAD, ()),)), shape)
    elif name == graph.head:
        _add(graph, checkpoint, Site(name, "matrix", (Ends(HEAD, (("", shape[0] if shape else 0),)),)), shape)
    elif name == wiring.head + BIAS or name.endswith("rotary_emb.inv_freq"):
        return
    elif (found := named(name)) is not None:
        layer, module, expert, parameter = found
        if isinstance(module, Aside):
            graph.behind += [name] if module.behind else []
        elif isinstance(module, Norm):
            _add(graph, checkpoint, Site(name, "norm", (Ends(layer + module.into, ()),)), shape)
        else:
            _add(graph, checkpoint, _matrix(graph, name, module, (layer, expert), shape, parameter), shape)
    else:
        raise _unlike(name, "a tensor that models of this type have", "another")


def _matrix(
    graph: Graph, name: str, module: Matrix, place: tuple[str, str], shape: tuple[int, ...], parameter: str
) -> Site:
    layer, expert = place
    bias = parameter == BIAS
    if len(shape) != (3 if module.stacked else 1 if bias else 2) or (shape[0] > _MOST and module.stacked):
        raise _unlike(name, f"{'three dimensions' if module.stacked else 'one' if bias else 'two'}", list(shape))
    rows = shape[-1] if bias else shape[-2]
    experts = [str(number) for number in range(shape[0])] if module.stacked else [expert]
    times = graph.times if module.reads == VALUE else 1
    ends = tuple(
        Ends(
            "" if bias else _stream(module.reads, layer, each),
            tuple(
                (_stream(stream, layer, each), size)
                for stream, size in zip(module.writes, _sizes(graph, module, rows, name), strict=True)
            ),
            times,
        )
        for each in experts
    )
    return Site(name, "bias" if bias else "matrix", ends)


def _stream(stream: str, layer: str, expert: str) -> str:
    if stream in ("", RESIDUAL, HEAD):
        return stream
    return layer + stream.replace("#", str(int(expert)) if expert else "")


def _sizes(graph: Graph, module: Matrix, rows: int, name: str) -> tuple[int, ...]:
    """Return the rows of each piece: all, halves, or those of queries, keys and values."""
    if len(module.writes) == 1:
        return (rows,)
    if len(module.writes) == 2:
        pieces: tuple[int, ...] = (rows // 2, rows // 2)
    else:
        shared = rows // (graph.times + 2)
        pieces = (rows - 2 * shared, shared, shared)
    if sum(pieces) != rows or (len(pieces) == 3 and pieces[1] % graph.head_size):
        raise _unlike(name, "rows of whole pieces", rows)
    return pieces


def _add(graph: Graph, checkpoint: Checkpoint, site: Site, shape: tuple[int, ...]) -> None:
    """Take a site in, its sizes compared with those of the streams so far."""
    if not stored_exactly(checkpoint[site.name]):
        raise UnsupportedError(
            "expected weights that are not quantized, for what is folded into integers would be rounded again; found "
            f"{checkpoint[site.name].codec}: fold the original",
            rule="fold.packed",
            where=site.name,
        )
    if checkpoint[site.name].dtype not in _FLOATS:
        raise _unlike(site.name, f"weights in {', '.join(_FLOATS)}", checkpoint[site.name].dtype)
    cols = shape[-1] if shape else 0
    for ends in site.ends:
        if ends.reads:
            _agree(graph, ends.reads, cols // ends.times, site.name)
            if cols % ends.times:
                raise _unlike(site.name, f"columns of {ends.times} heads each", cols)
        for stream, size in ends.writes:
            if stream:
                _agree(graph, stream, size, site.name)
    graph.add(site)


def _agree(graph: Graph, stream: str, size: int, name: str) -> None:
    if graph.sizes.setdefault(stream, size) != size or (stream.endswith(VALUE) and size % graph.head_size):
        raise _unlike(name, f"{graph.sizes[stream]} numbers of the stream {stream!r}", size)


def _require_ends(graph: Graph, checkpoint: Checkpoint) -> None:
    """Refuse a model of which a part is missing: embedding, norms, or what reads or puts out a stream."""
    for name in (graph.embedding, graph.wiring.norm + WEIGHT):
        if name not in graph.sites:
            raise _unlike(name, "this tensor", "none")
    if graph.head not in graph.sites and not graph.tied:
        raise _unlike(graph.head, "this tensor, or tie_word_embeddings", "neither")
    for stream in graph.sizes:
        outside = stream in (RESIDUAL, HEAD)
        if not outside and stream not in graph.readers:
            raise _unlike(checkpoint.location, f"a matrix that multiplies the stream {stream!r}", "none")
        if not outside and stream not in graph.norms and stream not in graph.written:
            raise _unlike(checkpoint.location, f"a norm or matrix that puts out the stream {stream!r}", "none")


def _unlike(where: str, expected: str, found: object) -> UnsupportedError:
    return UnsupportedError(f"expected {expected}, found {found}", rule="fold.tensor", where=where)
