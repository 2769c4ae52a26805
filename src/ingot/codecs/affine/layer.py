"""A decoder layer by its packed matrices: what it computes before attention and behind it, attention of a few queries,
and all of it for one more token (``spec/loading.md``, "Layers in native calls")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ingot.codecs.affine.matmul import PackedMatrix
from ingot.core.runtime import native
from ingot.model.tensor import Array

LARGEST_HEAD = 512
"""Columns of a head, at most; ``attend`` takes them in sixteens, ``DecoderLayer`` in pairs."""


@dataclass(frozen=True, slots=True)
class Norm:
    """A root mean square norm: ``weight`` [columns], f16 and bf16 as u16."""

    weight: Array
    eps: float


class DecoderLayer:
    """Seven products with x in 8 bits, the norms before them, rotary positions, the gate and the sums.

    Arrays have f16 and bf16 as u16. The result of a row does not depend on how many there are, on the number of threads
    or on the instruction set.

    Parameters
    ----------
    matrices : sequence of PackedMatrix
        Of queries, keys, values, the output of attention, gate, up and down; all of which ``rounds`` is true.
    biases : sequence of (array [rows] or None)
        As many.
    norms : sequence of (Norm or None)
        Before attention, before the gate; and of each head of queries and of keys, where there are such.
    width : int
        Columns of a head, at most ``LARGEST_HEAD``.
    dtype : "f32", "f16" or "bf16"
        Of x, biases and norms.

    Raises
    ------
    ValueError
        Sizes or types do not fit together.
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
        """Heads of keys."""
        self.steps = width % 16 == 0 and matrices[0].shape[0] // width % self.shared == 0
        """Whether ``step`` takes heads of this width."""
        weights = [None if norm is None else norm.weight for norm in norms]
        epsilons = [0.0 if norm is None else norm.eps for norm in norms]
        opened = [matrix.opened() for matrix in matrices]
        self._native = native.kernels.DecoderLayer(opened, list(biases), weights, epsilons, width, dtype)

    def project(
        self, x: Array, cosines: Array, sines: Array, queries: Array, keys: Array, values: Array, threads: int
    ) -> None:
        """Write queries, keys and values, rows of heads, of x [rows, hidden] and angles [rows, width]."""
        self._native.project(x, cosines, sines, queries, keys, values, threads)

    def finish(self, attended: Array, x: Array, out: Array, threads: int) -> None:
        """Write what the layer returns [rows, hidden], of what attention gave and of the layer's input."""
        self._native.finish(attended, x, out, threads)

    def step(
        self,
        x: Array,
        angles: tuple[Array, Array],
        kept: tuple[Array, Array],
        used: int,
        scale: float,
        out: Array,
        threads: int,
    ) -> None:
        """Write what the layer returns [sequences, hidden] for one more token of each sequence.

        The same as ``project``, ``attend`` and ``finish`` give.

        Parameters
        ----------
        x, out : [sequences, hidden]
        angles : (cosines, sines), [sequences, width]
        kept : (keys, values), [sequences, heads of keys, capacity, width]
            Those of the tokens are written behind the first ``used``, fewer than ``capacity``, and attended to with
            these.
        scale : float
            Of products of queries and keys.

        Raises
        ------
        ValueError
            Sizes or types do not fit together, heads have no whole sixteens of columns, or there is no room.
        """
        self._native.step(x, *angles, *kept, used, scale, out, threads)


def attend(
    queries: Array, keys: Array, values: Array, tokens: int, out: Array, dtype: str, scale: float, threads: int
) -> None:
    """Write softmax(scale * q k^T) v for a few queries, summed in f32 over segments of 256 tokens.

    Parameters
    ----------
    queries, out : [heads, rows, width]
        ``width`` in sixteens, at most ``LARGEST_HEAD``; f16 and bf16 as u16.
    keys, values : [heads, capacity, width]
    tokens : int
        How many of them, from the first on, are attended to.
    dtype : "f32", "f16" or "bf16"
        Of all arrays.

    Raises
    ------
    ValueError
        Sizes or types do not fit together.
    """
    native.kernels.attend(queries, keys, values, tokens, out, dtype, scale, threads)
