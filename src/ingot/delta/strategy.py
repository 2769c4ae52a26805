"""How a delta stores the difference of each tensor: the named strategies (``spec/operations.md``, "Deltas")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ingot.codecs.table import DELTA_EXACT, DELTA_ROWS, LOW_RANK
from ingot.errors import UsageError
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.delta import Int4DeltaLayout, PatchLayout, SignDeltaLayout, SparseDeltaLayout
from ingot.model.layouts.trellis import TrellisLayout
from ingot.quantization.rounding import TWO_SIDED
from ingot.reporting.report import duration_text

SMALL = 1 << 14
"""Tensors with at most this number of elements, and vectors, are stored exactly, because they need few bytes."""


@dataclass(frozen=True, slots=True)
class Storage:
    """The storage of a tensor's difference: the codec's id, its options, and the encoding of the parts.

    ``codec`` is an id of ``codecs.delta.base.delta_codec``. ``quantizer`` names the quantizer that rounds with the
    matrix's statistics (``quantization.encode.encoder_under``), or is None if no statistics are used.
    """

    codec: str
    options: Mapping[str, Any] = field(default_factory=dict)
    encoding: str = "raw"
    quantizer: str | None = None


EXACT = Storage(DELTA_EXACT)


def _grid(bits: int, group: int | str, **extra: Any) -> Storage:
    return Storage(AffineLayout.codec, {"bits": bits, "group": group, **extra})


STRATEGIES: Mapping[str, Storage] = {
    "exact": EXACT,
    "int8": _grid(8, "row"),
    "int4": _grid(4, 64),
    "int3": _grid(3, 64, quantizer="mse", unbiased=True),
    "int2": _grid(2, 64, quantizer="mse", symmetric=False, unbiased=True),
    "int1": Storage(AffineLayout.codec, {"bits": 1, "group": "row", "scales": "auto", "quantizer": "sign-rms"}, "zstd"),
    "low-rank": Storage(LOW_RANK, {"rank": 32}),
    "sparse-patch": Storage(PatchLayout.codec),
}
"""The storage of matrices for each strategy of a ``.zt``. ``auto`` is not listed, because it measures each matrix."""

GROUPS = (64, 96, 32)
"""Group sizes of a trellis; the first that divides the columns is used."""


def rounded(codec: str, bits: int, group: int | str, encoding: str = "raw", **extra: Any) -> Storage:
    """Return the storage of a difference that the quantizer ``two-sided`` rounds with statistics."""
    return Storage(codec, {"bits": bits, "group": group, **extra}, encoding, TWO_SIDED)


def trellis_storages(bits: int) -> tuple[Storage, ...]:
    """Return the storages of ``bits`` bits in order of preference: a trellis of each group size, then integers."""
    last = rounded(AffineLayout.codec, bits, 64, symmetric=bits > 2)
    return (*(rounded(TrellisLayout.codec, bits, group) for group in GROUPS), last)


SIGNS = rounded(AffineLayout.codec, 1, "row", "zstd")
CALIBRATED: Mapping[str, Sequence[Storage]] = {
    **{f"int{bits}": trellis_storages(bits) for bits in (4, 3, 2)},
    "int1": (SIGNS,),
    "low-rank": (Storage(LOW_RANK, {"rank": 32}, quantizer=TWO_SIDED),),
}
"""The storages of matrices with statistics, by strategy. ``first_fitting`` selects the storage of a matrix."""


def first_fitting(storages: Sequence[Storage], cols: int) -> Storage:
    """Return the first storage that supports ``cols`` columns: groups of a trellis must divide them."""
    return next(item for item in storages if item.codec != TrellisLayout.codec or cols % item.options["group"] == 0)


EVERY = ("sparse-patch",)
"""Exact strategies that use one codec for every tensor, for programs that read no other codec."""

AUTO = "auto"
WDELTA: Mapping[str, Storage] = {
    "sparse": Storage(SparseDeltaLayout.codec),
    "quantized": Storage(SignDeltaLayout.codec),
    "int4": Storage(Int4DeltaLayout.codec),
}
"""The storage of every tensor for each strategy of a ``.wdelta``."""

BY_CONTAINER: Mapping[str, Mapping[str, Storage]] = {
    "zt": STRATEGIES,
    "wdelta": WDELTA,
    "safetensors": {name: STRATEGIES[name] for name in EVERY},
}
"""The strategies of each container of deltas."""

DEFAULTS: Mapping[str, str] = {"zt": "exact", "wdelta": "int4", "safetensors": "sparse-patch"}
"""The default strategy of each container. It is exact, except for ``.wdelta``: there it is the lossy strategy with the
smallest error (``spec/deltas-quality.md``)."""
UNSCALED: Mapping[str, Storage] = {"wdelta": Storage(SparseDeltaLayout.codec, {"sparsity": 0.0})}
"""The exact storage for tensors whose values are too small for the scales of the default strategy, by container."""


def choices(strategy: str, name: str, shape: tuple[int, ...], dtype: str, container: str = "zt") -> Storage:
    """Return how ``strategy`` stores the difference of the tensor ``name`` of ``shape`` and element type ``dtype``.

    Raises ``UsageError`` ``delta.strategy`` for an unknown strategy, and for ``auto``, which depends on values.
    """
    strategies = BY_CONTAINER.get(container, STRATEGIES)
    if strategy not in strategies:
        names = (*strategies, AUTO) if strategies is STRATEGIES else strategies
        raise UsageError(
            f"expected a strategy {', '.join(names)} in {container}, found {strategy!r:.80}", rule="delta.strategy"
        )
    storage = strategies[strategy]
    for_every = strategies is not STRATEGIES or strategy in EVERY
    return storage if for_every or is_matrix(shape, dtype) else EXACT


def over_added_rows(storage: Storage, rows: int) -> Storage:
    """Return the storage of a difference if the fine-tune has more rows than the base.

    ``storage`` is used for the first ``rows`` rows, which both have; added rows are stored unchanged.
    """
    options = {"rows": rows, "inner": storage.codec, "options": dict(storage.options)}
    return Storage(DELTA_ROWS, options, storage.encoding)


def is_matrix(shape: tuple[int, ...], dtype: str) -> bool:
    """Return whether a tensor's difference may be approximate: floats, at least two dimensions, more than ``SMALL``."""
    return dtype in ("f32", "f16", "bf16") and len(shape) >= 2 and prod(shape) > SMALL


# seconds per weight, on one thread of the machine in the specification
_TRELLIS = 10e-6
_INTEGERS = 3e-6


@dataclass(frozen=True, slots=True)
class RoundingEstimate:
    """An estimate of the time to round matrices with their statistics.

    ``matrices`` is the number of tensors, ``weights`` the number of their weights in total, and ``seconds`` the time.
    """

    matrices: int
    weights: int
    seconds: float

    def describe(self) -> str:
        """Return the estimate as one sentence."""
        return (
            f"{self.matrices} tensors, {self.weights / 1e6:.1f} million weights, are rounded with their statistics: "
            f"about {duration_text(self.seconds)}"
        )


def estimate_rounding_time(rounded: Sequence[tuple[int, Storage]], workers: int) -> RoundingEstimate:
    """Return the estimated time of rounding tensors on ``workers`` threads.

    ``rounded`` contains the number of weights and the storage of each tensor. The result is at least the time of the
    slowest tensor.
    """
    times = [size * (_TRELLIS if item.codec == TrellisLayout.codec else _INTEGERS) for size, item in rounded]
    seconds = max(sum(times) / max(min(workers, len(times)), 1), max(times, default=0.0))
    return RoundingEstimate(len(times), sum(size for size, _ in rounded), seconds)
