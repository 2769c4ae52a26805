"""Strategy ``auto`` with statistics: each storage of a difference is replaced by its calibrated equivalent.

Bits are allocated by the plain error of a storage, so that matrices with and without statistics are comparable. Errors
weighted by a matrix's statistics were tried: they underestimate the combined cost of missing parts in several matrices,
and a delta of share 0.067 was further from the fine-tune on code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ingot.codecs.table import LOW_RANK
from ingot.delta.auto import Measured, Trial, measure
from ingot.delta.strategy import SIGNS, Storage, first_fitting, rounded, trellis_storages
from ingot.errors import UnsupportedError
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.trellis import TrellisLayout
from ingot.model.tensor import Tensor
from ingot.quantization.encode import encoder_under
from ingot.quantization.rounding import TWO_SIDED
from ingot.quantization.tensor import StatisticsSource, has_statistics

TRELLIS_ERRORS = {2: 0.079, 3: 0.020, 4: 0.0053}
"""The share of the squared norm that a trellis loses, by bits, after scaling to the norm of the difference.

Measured on values of Gauss, Laplace and Student (5) distributions in groups of 64: 0.077 to 0.079, 0.019 to 0.020,
0.0047 to 0.0055.
"""


def measure_calibrated(base: Tensor, tuned: Tensor, statistics: StatisticsSource) -> Measured:
    """Measure storages of a tensor's difference: calibrated ones if there are statistics for the tensor, else plain.

    ``Trial.error`` is that of the plain storage in both cases.
    """
    measured = measure(base, tuned)
    if not has_statistics(statistics, tuned.name, tuned.shape):
        return measured
    return replace(measured, trials=list(_trials(measured, tuned, statistics)))


def _trials(measured: Measured, tuned: Tensor, statistics: StatisticsSource) -> Iterator[Trial]:
    for trial in measured.trials:
        storage = calibrated_equivalent(trial.storage, tuned.shape[-1])
        if storage is None:
            yield trial
            continue
        size = _size(storage, tuned, statistics)
        error = _weighted_error(storage, trial)
        yield replace(trial, storage=storage, size=trial.size if size is None else size, weighted_error=error)


def _weighted_error(storage: Storage, trial: Trial) -> float:
    """Return the weighted error of a calibrated storage from the trial of the plain one.

    A calibrated storage preserves the norm of the difference, so no part counts as missing.
    """
    if storage == SIGNS:  # for signs, the plain error is 2 - 2c with c their cosine to the difference
        return 1 / max(1 - trial.error / 2, 0.5) ** 2 - 1
    if storage.codec == TrellisLayout.codec:
        return TRELLIS_ERRORS[storage.options["bits"]]
    return trial.weighted_error


def calibrated_equivalent(storage: Storage, cols: int) -> Storage | None:
    """Return the calibrated storage with the same bits; None without one."""
    bits = storage.options.get("bits")
    if storage.codec == LOW_RANK and storage.options["rank"]:
        return replace(storage, quantizer=TWO_SIDED)
    if storage.codec != AffineLayout.codec or not isinstance(bits, int) or bits > 6:
        return None
    if bits == 1:
        return SIGNS
    return first_fitting(trellis_storages(bits), cols) if bits <= 4 else rounded(AffineLayout.codec, bits, 64)


def _size(storage: Storage, tuned: Tensor, statistics: StatisticsSource) -> float | None:
    """Return the bytes of a difference in a calibrated storage; None if they equal those of the plain storage."""
    if storage.encoding != "raw" or storage.codec == LOW_RANK:
        return None
    assert storage.quantizer is not None
    quantizer = (storage.quantizer, storage.codec, storage.options)
    try:
        encoder = encoder_under(tuned.name, tuned.shape, quantizer, statistics, lambda _: None)
    except UnsupportedError:
        return float("inf")
    return float(sum(part.length or 0 for part in encoder.parts))
