"""How a delta stores the difference of each tensor: named strategies, as data (``spec/operations.md``, "Deltas")."""

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

SMALL = 1 << 14
"""Tensors of at most so many elements, and those of one dimension, are kept exactly: they cost next to nothing."""


@dataclass(frozen=True, slots=True)
class Storage:
    """How one tensor's difference is stored: codec id (``codecs.delta.base.delta_codec``), options, parts' encoding.

    ``quantizer``: numbers are chosen by what the matrix multiplies (``quantization.encode.encoder_under``).
    """

    codec: str
    options: Mapping[str, Any] = field(default_factory=dict)
    encoding: str = "raw"
    quantizer: str | None = None


EXACT = Storage(DELTA_EXACT)


def _grid(bits: int, group: int | str, **more: Any) -> Storage:
    return Storage(AffineLayout.codec, {"bits": bits, "group": group, **more})


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
"""Strategies for a delta in ``.zt``, by what they do with matrices. ``auto`` measures instead."""

GROUPS = (64, 96, 32)
"""Columns of a trellis's groups: the first of these that divides a row is taken."""


def rounded(codec: str, bits: int, group: int | str, encoding: str = "raw", **more: Any) -> Storage:
    """Return the storage of a difference that is rounded under both factors."""
    return Storage(codec, {"bits": bits, "group": group, **more}, encoding, TWO_SIDED)


def streams(bits: int) -> tuple[Storage, ...]:
    """Return storages of so many bits through a trellis; integers where no group divides a row."""
    last = rounded(AffineLayout.codec, bits, 64, symmetric=bits > 2)
    return (*(rounded(TrellisLayout.codec, bits, group) for group in GROUPS), last)


SIGNS = rounded(AffineLayout.codec, 1, "row", "zstd")
CALIBRATED: Mapping[str, Sequence[Storage]] = {
    **{f"int{bits}": streams(bits) for bits in (4, 3, 2)},
    "int1": (SIGNS,),
    "low-rank": (Storage(LOW_RANK, {"rank": 32}, quantizer=TWO_SIDED),),
}
"""What strategies do with matrices that there are statistics of: the first that a row fits."""


def calibrated(ways: Sequence[Storage], cols: int) -> Storage:
    """Return the first way whose groups a row of so many columns fits."""
    fitting = (way for way in ways if way.codec != TrellisLayout.codec or cols % way.options["group"] == 0)
    return next(fitting)


EVERY = ("sparse-patch",)
"""Strategies for every tensor: exact ones, for those who read nothing else."""

AUTO = "auto"
WDELTA: Mapping[str, Storage] = {
    "sparse": Storage(SparseDeltaLayout.codec),
    "quantized": Storage(SignDeltaLayout.codec),
    "int4": Storage(Int4DeltaLayout.codec),
}
"""Strategies of a ``.wdelta`` file, for every tensor."""

BY_CONTAINER: Mapping[str, Mapping[str, Storage]] = {
    "zt": STRATEGIES,
    "wdelta": WDELTA,
    "safetensors": {name: STRATEGIES[name] for name in EVERY},
}
"""The containers that deltas are written to, and how they can be stored there."""

DEFAULTS: Mapping[str, str] = {"zt": "exact", "wdelta": "int4", "safetensors": "sparse-patch"}
"""What each container gets where nothing is asked for: exact where it can be, of the lossy ones the nearest
(``spec/deltas-quality.md``)."""
UNSCALED: Mapping[str, Storage] = {"wdelta": Storage(SparseDeltaLayout.codec, {"sparsity": 0.0})}
"""How a container holds by default, exactly, what is too small for the scales of its strategy."""


def choices(strategy: str, name: str, shape: tuple[int, ...], dtype: str, container: str = "zt") -> Storage:
    """Return how ``strategy`` stores the difference of the tensor ``name`` of ``shape`` and element type ``dtype``.

    Raises ``UsageError`` ``delta.strategy`` for a strategy that is not known (``auto`` is no choice by name alone).
    """
    known = BY_CONTAINER.get(container, STRATEGIES)
    if strategy not in known:
        names = (*known, AUTO) if known is STRATEGIES else known
        raise UsageError(
            f"expected a strategy {', '.join(names)} in {container}, found {strategy!r:.80}", rule="delta.strategy"
        )
    storage = known[strategy]
    every = known is not STRATEGIES or strategy in EVERY
    return storage if every or is_matrix(shape, dtype) else EXACT


def over_added_rows(storage: Storage, rows: int) -> Storage:
    """Return how a difference is stored for the ``rows`` rows that both have, and added rows as they are."""
    options = {"rows": rows, "inner": storage.codec, "options": dict(storage.options)}
    return Storage(DELTA_ROWS, options, storage.encoding)


def is_matrix(shape: tuple[int, ...], dtype: str) -> bool:
    """Whether a tensor is worth an approximate difference: floats, two dimensions at least, not ``SMALL``."""
    return dtype in ("f32", "f16", "bf16") and len(shape) >= 2 and prod(shape) > SMALL


# seconds a weight, on one thread of the machine that the spec's figures are of
_TRELLIS = 10e-6
_OTHERS = 3e-6


@dataclass(frozen=True, slots=True)
class DiffPlan:
    """Matrices that will be rounded by what they multiply, their weights, and about how many seconds that takes."""

    matrices: int
    weights: int
    seconds: float

    def told(self) -> str:
        """Return it in words."""
        hours, minutes = divmod(int(self.seconds / 60 + 0.5), 60)
        long = f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else "less than a minute"
        return (
            f"{self.matrices} tensors, {self.weights / 1e6:.1f} million weights, are rounded by what they multiply: "
            f"about {long}"
        )


def expected(rounded: Sequence[tuple[int, Storage]], workers: int) -> DiffPlan:
    """Return the estimated time for tensors on ``workers`` threads; at least the time of the largest tensor."""
    each = [size * (_TRELLIS if way.codec == TrellisLayout.codec else _OTHERS) for size, way in rounded]
    seconds = max(sum(each) / max(min(workers, len(each)), 1), max(each, default=0.0))
    return DiffPlan(len(each), sum(size for size, _ in rounded), seconds)
