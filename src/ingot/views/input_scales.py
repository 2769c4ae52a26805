"""Input scales of layers that quantize their inputs to NVFP4: one number per matrix, from calibration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

import numpy as np

from ingot.codecs.scaled_codebook.tables import largest
from ingot.codecs.table import CODECS
from ingot.errors import FormatError
from ingot.model.bytesource import DerivedSource
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.part import Part
from ingot.model.tensor import Tensor
from ingot.naming.names import INPUT_SCALE, merged_matrix
from ingot.quantization.tensor import StatisticsSource
from ingot.views.common import BuildTensor

WEIGHT = ".weight"
_LIMIT = largest("f4_e2m1fn") * largest("f8_e4m3fn")

LoadStatistics = Callable[[], StatisticsSource]


def members_of_merged(names: Iterable[str]) -> Mapping[str, Sequence[str]]:
    """Return, for each matrix in ``names``, the matrices in ``names`` that programs merge with it, including itself."""
    groups: dict[str, list[str]] = {}
    members = {}
    for name in names:
        members[name] = groups.setdefault(merged_matrix(name) or name, [])
        members[name].append(name)
    return members


def input_scales(
    checkpoint: Checkpoint, names: Sequence[str], load_statistics: LoadStatistics
) -> dict[str, tuple[str, BuildTensor]]:
    """Return, by the name of each input scale, the name of its matrix and a function that builds the scale's tensor.

    The scale is 6 * 448 divided by the largest magnitude of the matrix's inputs: the largest E2M1 number is 6, the
    largest E4M3 number 448. Matrices that programs merge share the smallest scale. The statistics are read when the
    scale is read.

    Reading a scale raises ``FormatError`` ``statistics.absmax`` if the statistics lack the largest magnitudes of
    inputs.
    """
    members = members_of_merged(name for name in names if name.endswith(WEIGHT))

    def builder(name: str, matrix: str) -> BuildTensor:
        return lambda: _tensor(name, _InputScale(checkpoint[matrix], members[matrix], load_statistics))

    scales = {matrix.removesuffix(WEIGHT) + INPUT_SCALE: matrix for matrix in members}
    return {name: (matrix, builder(name, matrix)) for name, matrix in scales.items()}


def _tensor(name: str, source: _InputScale) -> Tensor:
    part = Part("f32", source.size, source, where=name)
    return Tensor(name, (1,), "f32", DenseLayout.codec, {DATA: part}, {}, CODECS[DenseLayout.codec])


class _InputScale(DerivedSource):
    """A ``ByteSource`` of one scale, computed from the statistics of the matrices that share it."""

    mapped = False
    size = 4

    def __init__(self, matrix: Tensor, members: Sequence[str], load_statistics: LoadStatistics) -> None:
        self.name = matrix.name
        self._matrix = matrix
        self._members = members
        self._load_statistics = load_statistics

    def _scale(self) -> np.float32:
        statistics = self._load_statistics()
        amax = max(_largest_input(statistics, member) for member in self._members)
        with np.errstate(over="ignore"):
            scale = np.float32(_LIMIT / amax) if amax else np.float32(1)  # experts without tokens have no inputs
        return min(scale, np.finfo(np.float32).max)

    def view(self, offset: int, length: int) -> memoryview:
        return memoryview(self._scale().tobytes())[offset : offset + length]

    def readinto(self, offset: int, out: memoryview) -> None:
        out.cast("B")[:] = self.view(offset, out.nbytes)

    def changed(self) -> bool:
        return any(part.source.changed() for part in self._matrix.parts.values())

    def close(self) -> None:
        """Do nothing: the view owns the statistics."""

    def __reduce__(self) -> NoReturn:
        raise TypeError("a scale of inputs cannot be pickled: it is computed in this process")


def _largest_input(statistics: StatisticsSource, name: str) -> float:
    """Return the largest magnitude of a matrix's inputs; 0 for an expert without tokens."""
    entry = statistics.for_matrix(name)
    if entry is not None and not entry.count:
        return 0.0
    absmax = None if entry is None else entry.absmax
    if absmax is None:
        raise FormatError(
            "statistics.absmax",
            "the statistics have no largest magnitudes of this matrix's inputs, which the scale of its inputs needs; "
            "use statistics of `ingot calibrate`, without a rotation of the model",
            where=name,
        )
    return float(np.abs(absmax).max(initial=0))
