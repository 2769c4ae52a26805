"""Structured pruning of feed-forward networks: which blocks of intermediate channels go (``spec/operations.md``).

A channel's score is the product of the norms of the weights that make it and of those that read it,
``|gate row| * |up row| * |down column|``: it does not change when a factor moves between two of them, which the network
would not notice either. With activations the norm of the channel's activation, which gate and up only estimate, takes
their place: ``activation * |down column|``, the criterion of Wanda (Sun et al., "A Simple and Effective Pruning
Approach for Large Language Models", 2023, section 3: weight magnitude times input norm) summed over a channel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ingot.artifacts.open import open as open_checkpoint
from ingot.core.numeric.blocks import Blocks, block_count
from ingot.core.numeric.floats import FLOATS
from ingot.core.runtime.parallel import ordered
from ingot.core.runtime.progress import Progress, ProgressCallback
from ingot.engine.chunks import chunks
from ingot.errors import UsageError
from ingot.model.checkpoint import Checkpoint
from ingot.model.tensor import Array, Tensor
from ingot.stores.location import AnyPath
from ingot.views.pruning.ffn import Ffn, Skipped, find_ffns
from ingot.views.values import Pruning

_CHUNK = 1 << 18
BLOCK = 64


@dataclass(frozen=True, slots=True)
class PruneOptions:
    """How much goes: a ``fraction`` (0 to 1) of each FFN's blocks of ``block`` channels.

    ``activations`` has a vector per FFN, under the name of its down projection's weight or module.
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
    """What goes of which tensor, remarks on FFNs that stay whole, and the bytes that were read to find out."""

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
    """Choose what ``prune`` leaves out: the blocks of channels of every feed-forward network that matter least.

    Reads the networks.

    Parameters
    ----------
    checkpoint : Checkpoint
    fraction : float
        Share of each network's blocks, 0 to 1; one at least stays.
    block : int
        Channels per block.
    activations : path, optional
        A checkpoint with a vector per network, the norm of each channel's activation, under the name of its down
        projection. By the weights alone without.
    threads : int, optional

    Raises
    ------
    UsageError
        ``convert.prune``, ``convert.activations``; and what opening the activations raises.
    """
    return choose_pruning(checkpoint, PruneOptions(fraction, block, None, threads), activations).tensors


def choose_pruning(
    source: Checkpoint,
    options: PruneOptions,
    activations: AnyPath | None = None,
    progress: ProgressCallback | None = None,
) -> PrunePlan:
    """Return what tensors lose; the activations are opened for it. Errors as ``weakest_blocks``."""
    if activations is None:
        return plan_pruning(source, options, progress, source.nbytes)
    with open_checkpoint(activations) as norms:
        return plan_pruning(source, replace(options, activations=norms), progress, source.nbytes)


def plan_pruning(
    source: Mapping[str, Tensor], options: PruneOptions, progress: ProgressCallback | None = None, further: int = 0
) -> PrunePlan:
    """Score every FFN's blocks, in chunks, and choose those with the lowest scores of each.

    Parameters
    ----------
    progress : callable, optional
        Told bytes read; ``further`` bytes follow afterwards and are part of the total.

    Raises
    ------
    UsageError
        ``convert.prune``: no FFN that could be pruned. ``convert.activations``: no vector for an FFN, or a wrong one.
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
    """Keep the blocks with the highest mean score: all but the stated fraction, rounded, and never none.

    A block with a score that is no number is kept. Of equal blocks the first goes.
    """
    channels = len(score)
    count = block_count(channels, options.block)
    edges = np.arange(count) * options.block
    sizes = np.diff(np.append(edges, channels))
    means = np.add.reduceat(score, edges) / sizes if count else np.zeros(0)
    means = np.where(np.isnan(means), np.inf, means)
    dropped = min(int(options.fraction * count + 0.5), count - 1)
    kept = np.ones(count, bool)
    kept[np.argsort(means, kind="stable")[: max(dropped, 0)]] = False
    return Blocks.of(channels, options.block, [bool(flag) for flag in kept])


def channel_norms(tensor: Tensor, axis: int) -> Array:
    """Return the Euclidean norm of every row (axis 0) or column (axis 1), in f64, by chunks; digests are checked."""
    rows, cols = tensor.matrix_shape
    squares = np.zeros(rows if axis == 0 else cols)
    done = 0
    for piece in chunks(tensor, (rows, cols), max(1, _CHUNK // max(cols, 1))):
        values = piece.astype(np.float64)
        np.square(values, out=values)
        if axis == 0:
            squares[done : done + len(values)] = values.sum(axis=1)
        else:
            squares += values.sum(axis=0)
        done += len(values)
    return np.asarray(np.sqrt(squares))


def _factors(
    ffn: Ffn, source: Mapping[str, Tensor], activations: Mapping[str, Tensor] | None
) -> tuple[Sequence[str], Array | None]:
    """Return the matrices whose norms are multiplied, and the activations where they are given."""
    if activations is None:
        return (*ffn.inputs, ffn.down), None
    return (ffn.down,), _activation(ffn, activations)


def _activation(ffn: Ffn, activations: Mapping[str, Tensor]) -> Array:
    name = next((name for name in (ffn.down, ffn.module) if name in activations), None)
    if name is None:
        raise UsageError(
            f"expected activations named {ffn.down} or {ffn.module}, found none", rule="convert.activations"
        )
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
