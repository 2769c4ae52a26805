"""A decoder layer with packed matrices: the parts before and after attention, attention of a few queries, and a full
step for one more token (``spec/loading.md``, "Layers in native calls").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ingot.codecs.affine.matmul import PackedMatrix
from ingot.core.runtime import native
from ingot.model.tensor import Array

LARGEST_HEAD = 512
"""The largest number of columns of a head; it must be even for ``DecoderLayer``, a multiple of 16 for ``attend``."""


@dataclass(frozen=True, slots=True)
class Norm:
    """A root mean square norm: ``weight`` [columns], f16 and bf16 as u16."""

    weight: Array
    eps: float


class DecoderLayer:
    """A decoder layer: seven products with x in 8 bits, norms, rotary positions, the gate and the residual sums.

    In arrays, f16 and bf16 are u16. The result for a row does not depend on the number of rows or threads, or on the
    instruction set.

    Parameters
    ----------
    matrices : sequence of PackedMatrix
        Queries, keys, values, attention output, gate, up and down; ``rounds`` must be true for all.
    biases : sequence of (array [rows] or None)
        The bias of each matrix, or None.
    norms : sequence of (Norm or None)
        Norms before attention, before the gate, of each head of queries, and of each head of keys, or None.
    width : int
        Columns of a head, at most ``LARGEST_HEAD``.
    dtype : "f32", "f16" or "bf16"
        The dtype of x, biases and norms.

    Raises
    ------
    ValueError
        Sizes or types contradict each other.
    """

    def __init__(
        self,
        matrices: Sequence[PackedMatrix],
        biases: Sequence[Array | None],
        norms: Sequence[Norm | None],
        width: int,
        dtype: str,
    ) -> None:
        self.shared = matrices[1].shape[0] // width
        """The number of heads of keys."""
        self.steps = width % 16 == 0 and matrices[0].shape[0] // width % self.shared == 0
        """Whether ``step`` supports heads of this width."""
        weights = [None if norm is None else norm.weight for norm in norms]
        epsilons = [0.0 if norm is None else norm.eps for norm in norms]
        matrices_native = [matrix.native_matrix() for matrix in matrices]
        self._native = native.kernels.DecoderLayer(matrices_native, list(biases), weights, epsilons, width, dtype)

    def project(
        self, x: Array, cosines: Array, sines: Array, queries: Array, keys: Array, values: Array, threads: int
    ) -> None:
        """Compute queries, keys and values, as rows of heads, from x [rows, hidden] and angles [rows, width]."""
        self._native.project(x, cosines, sines, queries, keys, values, threads)

    def finish(self, attended: Array, x: Array, out: Array, threads: int) -> None:
        """Compute the layer's output [rows, hidden] from the output of attention and the layer's input."""
        self._native.finish(attended, x, out, threads)

    def step(
        self,
        x: Array,
        angles: tuple[Array, Array],
        cache: tuple[Array, Array],
        used: int,
        scale: float,
        out: Array,
        threads: int,
    ) -> None:
        """Compute the layer's output [sequences, hidden] for one more token of each sequence.

        Equivalent to ``project``, ``attend`` and ``finish``.

        Parameters
        ----------
        x, out : [sequences, hidden]
        angles : (cosines, sines), [sequences, width]
        cache : (keys, values), [sequences, heads of keys, capacity, width]
            The new token's keys and values are written after the first ``used`` tokens; ``used`` must be below
            ``capacity``. Attention covers the ``used`` tokens and the new token.
        scale : float
            Factor of the products of queries and keys.

        Raises
        ------
        ValueError
            Sizes or types contradict each other, the width of heads is no multiple of 16, or the cache is full.
        """
        self._native.step(x, *angles, *cache, used, scale, out, threads)


def attend(
    queries: Array, keys: Array, values: Array, tokens: int, out: Array, dtype: str, scale: float, threads: int
) -> None:
    """Compute softmax(scale * q k^T) v for a few queries, summed in f32 over segments of 256 tokens.

    Parameters
    ----------
    queries, out : [heads, rows, width]
        ``width`` is a multiple of 16, at most ``LARGEST_HEAD``; f16 and bf16 as u16.
    keys, values : [heads, capacity, width]
    tokens : int
        Attention covers this many tokens, from the first on.
    dtype : "f32", "f16" or "bf16"
        The dtype of all arrays.

    Raises
    ------
    ValueError
        Sizes or types contradict each other.
    """
    native.kernels.attend(queries, keys, values, tokens, out, dtype, scale, threads)
