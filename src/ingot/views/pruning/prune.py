"""Structured pruning of feed-forward networks (FFNs): choose blocks of intermediate channels to drop.

A channel's score is the product of the norms of the weights that write and read it: ``|gate row| * |up row| * |down
column|``. Moving a constant factor between these weights changes neither the network's output nor the score. If
activations are given, the norm of the channel's activation replaces the estimate from gate and up: ``activation * |down
column|``. This is Wanda's criterion (Sun et al., "A Simple and Effective Pruning Approach for Large Language Models",
2023, section 3: weight magnitude times input norm), summed over a channel. See ``spec/operations.md``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ingot.artifacts.open import open as open_checkpoint
from ingot.core.numeric.blocks import Blocks, block_count
from ingot.core.numeric.dtypes import DTYPES, FLOATS
from ingot.core.runtime.parallel import ordered
from ingot.core.runtime.progress import Progress, ProgressCallback
from ingot.engine.chunks import chunks
from ingot.errors import UsageError
from ingot.model.checkpoint import Checkpoint
from ingot.model.tensor import Array, Tensor
from ingot.naming.names import role_of
from ingot.stores.location import AnyPath
from ingot.views.values import Pruning

# Names of modules: (gate or None, up, down). The first row whose tensors all exist applies. Gated rows come first: `w1`
# and `w2` alone are a plain FFN, with `w3` a gated one (Llama's original names, Mixtral).
_TRIPLES: tuple[tuple[str | None, str, str], ...] = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("wi_0", "wi_1", "wo"),
    ("ffn_gate", "ffn_up", "ffn_down"),
    (None, "up_proj", "down_proj"),
    (None, "fc1", "fc2"),
    (None, "fc_in", "fc_out"),
    (None, "c_fc", "c_proj"),
    (None, "lin1", "lin2"),
    (None, "dense_h_to_4h", "dense_4h_to_h"),
    (None, "intermediate.dense", "output.dense"),
    (None, "wi", "wo"),
    (None, "ffn_up", "ffn_down"),
    (None, "w1", "w2"),
)
_ENDS = ("weight", "kernel", "")
# matrices of FFNs that match no row above; they are reported, not pruned
_UNMATCHED = ("gate_up_proj", "w1_w3", "w12", "c_fc", "fc1", "up_proj", "dense_h_to_4h", "experts")
# A module whose matrix is (in, out) in GPT-2, but (out, in) in other models.
_AMBIGUOUS = "c_fc"


@dataclass(frozen=True, slots=True)
class Ffn:
    """One feed-forward network: the names of its matrices and their orientations.

    ``inputs`` are the matrices that write the intermediate channels: gate (if it exists) and up. ``down`` is the matrix
    that reads them. ``channel_axis`` maps each name to the dimension of the channels.
    """

    inputs: tuple[str, ...]
    down: str
    channels: int
    channel_axis: Mapping[str, int]

    @property
    def module(self) -> str:
        """The name of the module that contains ``down``."""
        return self.down.removesuffix(".weight").removesuffix(".kernel")


@dataclass(frozen=True, slots=True)
class Skipped:
    """A feed-forward network, or a part of one, that cannot be pruned, and the reason."""

    name: str
    reason: str


def find_ffns(tensors: Mapping[str, Tensor]) -> Iterator[Ffn | Skipped]:
    """Yield the FFNs of a checkpoint in order, one per expert.

    Yields a ``Skipped`` for an FFN that cannot be pruned. At the end, yields a ``Skipped`` for each matrix whose name
    indicates an FFN whose other matrices are not found.
    """
    matched: set[str] = set()
    for name in tensors:
        if name in matched or role_of(name) != "mlp" or len(tensors[name].shape) < 2:
            continue
        names = _matrices_of_ffn(name, tensors)
        if names is not None:
            matched |= {item for item in names if item is not None}
            yield _checked_ffn(names, tensors)
    for name in tensors:
        if name not in matched and _looks_like_ffn(name, tensors[name]):
            yield Skipped(name, "its channels cannot be found by its name: fused, stacked or unknown")


def _looks_like_ffn(name: str, tensor: Tensor) -> bool:
    modules = name.split(".")
    return len(tensor.shape) > 1 and role_of(name) == "mlp" and any(module in modules for module in _UNMATCHED)


def _matrices_of_ffn(name: str, tensors: Mapping[str, Tensor]) -> tuple[str | None, str, str] | None:
    """Return the names of the gate, up and down matrices of the FFN to which ``name`` belongs.

    The first name is None if the FFN has no gate. The result is None if ``name`` belongs to no FFN.
    """
    for triple in _TRIPLES:
        for module in filter(None, triple):
            for end in _ENDS:
                tail = f"{module}.{end}" if end else module
                if name != tail and not name.endswith(f".{tail}"):
                    continue
                prefix = name[: len(name) - len(tail)]
                names = [f"{prefix}{item}.{end}" if end else f"{prefix}{item}" for item in triple if item]
                if all(item in tensors and role_of(item) == "mlp" for item in names):
                    return (names[0], names[1], names[2]) if len(names) == 3 else (None, names[0], names[1])
    return None


def _checked_ffn(names: tuple[str | None, str, str], tensors: Mapping[str, Tensor]) -> Ffn | Skipped:
    gate, up, down = names
    inputs = tuple(name for name in (gate, up) if name is not None)
    for name in (*inputs, down):
        tensor = tensors[name]
        if tensor.dtype not in DTYPES or not DTYPES[tensor.dtype].is_float or DTYPES[tensor.dtype].bits < 8:
            return Skipped(down, f"{name} contains {tensor.dtype}, which cannot be compared")
        if tensor.decoder is None:
            return Skipped(down, f"there is no decoder for {name}")
        if len(tensor.shape) != 2:
            return Skipped(down, f"{name} has {len(tensor.shape)} dimensions")
    axis = _axis(up, tensors)
    if axis is None:
        return Skipped(down, f"the tensors do not show which dimension of {up} is the intermediate one")
    channels = tensors[up].shape[axis]
    if any(tensors[name].shape != tensors[up].shape for name in inputs) or tensors[down].shape[1 - axis] != channels:
        return Skipped(down, f"its shapes do not fit: {[list(tensors[name].shape) for name in (*inputs, down)]}")
    return Ffn(inputs, down, channels, {**dict.fromkeys(inputs, axis), down: 1 - axis})


def _axis(up: str, tensors: Mapping[str, Tensor]) -> int | None:
    """Return the dimension of the intermediate channels in the up projection, or None if it is ambiguous.

    Linear layers are stored as (out, in), Flax's kernels as (in, out). GPT-2's ``c_fc`` is (in, out), but in some later
    models it is (out, in). Then the bias decides, because it has one value per intermediate channel.
    """
    if up.endswith(".kernel"):
        return 1
    if _AMBIGUOUS not in up.split("."):
        return 0
    bias = tensors.get(f"{up.removesuffix('weight')}bias")
    rows, cols = tensors[up].shape
    if bias is None or len(bias.shape) != 1 or rows == cols:
        return None
    return {rows: 0, cols: 1}.get(bias.shape[0])


_CHUNK = 1 << 18
BLOCK = 64


@dataclass(frozen=True, slots=True)
class PruneOptions:
    """Options of pruning: the ``fraction`` (0 to 1) of blocks to drop in each FFN, and the channels per ``block``.

    ``activations`` has a vector per FFN. Its name is that of the down projection's weight or module.
    """

    fraction: float
    block: int = BLOCK
    activations: Mapping[str, Tensor] | None = None
    workers: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 1:
            raise UsageError(f"expected a fraction from 0 to 1 to prune, found {self.fraction}", rule="convert.prune")
        if self.block < 1:
            raise UsageError(f"expected blocks of at least 1 channel, found {self.block}", rule="convert.prune")


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """The chosen prunings by tensor name, notes on FFNs that are not pruned, and the number of bytes read."""

    tensors: Mapping[str, Pruning] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    read: int = 0


def weakest_blocks(
    checkpoint: Checkpoint,
    fraction: float,
    *,
    block: int = BLOCK,
    activations: AnyPath | None = None,
    threads: int | None = None,
) -> Mapping[str, Pruning]:
    """Choose the least important blocks of channels of every feed-forward network, for ``prune``.

    All weights of the networks are read.

    Parameters
    ----------
    checkpoint : Checkpoint
    fraction : float
        Share of each network's blocks, 0 to 1; at least one block of each network remains.
    block : int
        Channels per block.
    activations : path, optional
        A checkpoint with the norm of each channel's activation, a vector per network under the name of its down
        projection. Without it, only weights are compared.
    threads : int, optional

    Raises
    ------
    UsageError
        ``convert.prune``, ``convert.activations``; and the errors of ``ingot.open`` for the activations.

    Examples
    --------
    >>> prunings = ingot.views.weakest_blocks(ingot.open("model"), 0.25)
    >>> len(prunings)
    12
    """
    return choose_pruning(checkpoint, PruneOptions(fraction, block, None, threads), activations).tensors


def choose_pruning(
    source: Checkpoint,
    options: PruneOptions,
    activations: AnyPath | None = None,
    progress: ProgressCallback | None = None,
) -> PrunePlan:
    """Choose the prunings of a checkpoint, and open the activations. Raises the errors of ``weakest_blocks``."""
    if activations is None:
        return plan_pruning(source, options, progress, source.nbytes)
    with open_checkpoint(activations) as norms:
        return plan_pruning(source, replace(options, activations=norms), progress, source.nbytes)


def plan_pruning(
    source: Mapping[str, Tensor], options: PruneOptions, progress: ProgressCallback | None = None, further: int = 0
) -> PrunePlan:
    """Score the blocks of every FFN in chunks of its matrices, and choose those with the lowest scores.

    Parameters
    ----------
    progress : callable, optional
        Receives the number of bytes read so far, and the total number of bytes.
    further : int
        Bytes that the caller reads later; they are part of the total.

    Raises
    ------
    UsageError
        ``convert.prune``: no FFN that can be pruned. ``convert.activations``: a missing or invalid vector.
    """
    networks = list(find_ffns(source))
    ffns = [item for item in networks if isinstance(item, Ffn)]
    notes = tuple(f"not pruned: {item.name}: {item.reason}" for item in networks if isinstance(item, Skipped))
    if not ffns:
        raise UsageError(
            f"found no feed-forward network to prune{''.join(f'; {note}' for note in notes[:1])}", rule="convert.prune"
        )
    factors = [_factors(ffn, source, options.activations) for ffn in ffns]
    total = sum(source[name].nbytes for names, _ in factors for name in names)
    state = Progress(total + further, progress)

    def masks(item: tuple[Ffn, tuple[Sequence[str], Array | None]]) -> tuple[Ffn, Blocks]:
        ffn, (names, activation) = item
        score = np.ones(ffn.channels) if activation is None else activation
        for name in names:
            score = score * channel_norms(source[name], ffn.channel_axis[name])
            state.advance(source[name].nbytes, name)
        return ffn, choose(score, options)

    tensors = {
        name: Pruning(ffn.channel_axis[name], blocks)
        for ffn, blocks in ordered(masks, zip(ffns, factors, strict=True), options.workers)
        for name in (*ffn.inputs, ffn.down)
    }
    return PrunePlan(tensors, notes, total)


def choose(score: Array, options: PruneOptions) -> Blocks:
    """Return the blocks to keep: those with the highest mean scores, at least one block.

    The stated fraction of blocks, rounded, is dropped. Blocks with NaN scores are kept. Among equal blocks, the first
    is dropped first.
    """
    channels = len(score)
    count = block_count(channels, options.block)
    edges = np.arange(count) * options.block
    sizes = np.diff(np.append(edges, channels))
    means = np.add.reduceat(score, edges) / sizes if count else np.zeros(0)
    means = np.where(np.isnan(means), np.inf, means)
    dropped = min(int(options.fraction * count + 0.5), count - 1)
    remaining = np.ones(count, bool)
    remaining[np.argsort(means, kind="stable")[: max(dropped, 0)]] = False
    return Blocks.from_flags(channels, options.block, [bool(flag) for flag in remaining])


def channel_norms(tensor: Tensor, axis: int) -> Array:
    """Return the f64 Euclidean norm of every row (axis 0) or column (axis 1), read in chunks; checks digests."""
    rows, cols = tensor.matrix_shape
    squares = np.zeros(rows if axis == 0 else cols)
    first = 0
    for chunk in chunks(tensor, (rows, cols), max(1, _CHUNK // max(cols, 1))):
        values = chunk.astype(np.float64)
        np.square(values, out=values)
        if axis == 0:
            squares[first : first + len(values)] = values.sum(axis=1)
        else:
            squares += values.sum(axis=0)
        first += len(values)
    return np.asarray(np.sqrt(squares))


def _factors(
    ffn: Ffn, source: Mapping[str, Tensor], activations: Mapping[str, Tensor] | None
) -> tuple[Sequence[str], Array | None]:
    """Return the matrices of an FFN whose norms are multiplied, and the activations of its channels.

    Without ``activations``, the latter is None.
    """
    if activations is None:
        return (*ffn.inputs, ffn.down), None
    return (ffn.down,), _activation(ffn, activations)


def _activation(ffn: Ffn, activations: Mapping[str, Tensor]) -> Array:
    name = next((name for name in (ffn.down, ffn.module) if name in activations), None)
    if name is None:
        raise UsageError(f"there are no activations named {ffn.down} or {ffn.module}", rule="convert.activations")
    tensor = activations[name]
    if tensor.shape != (ffn.channels,) or tensor.dtype not in FLOATS:
        raise UsageError(
            f"expected a vector of {ffn.channels} floats, found {tensor.dtype} of shape {list(tensor.shape)}",
            rule="convert.activations",
            where=name,
        )
    values = tensor.numpy().astype(np.float64)
    if not (np.isfinite(values) & (values >= 0)).all():
        raise UsageError("expected magnitudes: finite and not negative", rule="convert.activations", where=name)
    return values
