"""Strategy ``auto`` where it is known what matrices multiply: each way to store a difference is the calibrated one.

Which matrix gets how many bytes goes by the plain error that a calibrated way leaves, so that matrices compare with
those of which nothing is known. Errors under a matrix's own factors were tried as the measure: they say too little of
what is left out whole in several matrices at once, and gave a delta of share 0.067 that was further from the fine-tune
on code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ingot.codecs.table import LOW_RANK
from ingot.delta.auto import Measured, Trial, measure
from ingot.delta.strategy import SIGNS, Storage, calibrated, rounded, streams
from ingot.errors import UnsupportedError
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.trellis import TrellisLayout
from ingot.model.tensor import Tensor
from ingot.quantization.encode import encoder_under
from ingot.quantization.rounding import TWO_SIDED
from ingot.quantization.tensor import StatisticsSource, has_statistics

STREAMS_LEAVE = {2: 0.079, 3: 0.020, 4: 0.0053}
"""The share of the squared norm that a trellis of so many bits leaves once it is stretched to the difference's length:
0.077 to 0.079, 0.019 to 0.020, 0.0047 to 0.0055 of values of Gauss, Laplace and Student (5), in groups of 64."""


def measure_known(base: Tensor, tuned: Tensor, known: StatisticsSource) -> Measured:
    """As ``measure``, with calibrated ways where there are statistics; errors are stated as of the plain ones."""
    found = measure(base, tuned)
    if not has_statistics(known, tuned.name, tuned.shape):
        return found
    return replace(found, trials=list(_trials(found, tuned, known)))


def _trials(found: Measured, tuned: Tensor, known: StatisticsSource) -> Iterator[Trial]:
    for trial in found.trials:
        way = counterpart(trial.storage, tuned.shape[-1])
        if way is None:
            yield trial
            continue
        size = _size(way, tuned, known)
        yield replace(trial, storage=way, size=trial.size if size is None else size, harm=_harm(way, trial))


def _harm(way: Storage, trial: Trial) -> float:
    """Return what a calibrated way leaves: it is as long as the difference, and nothing falls short."""
    if way == SIGNS:  # of signs as long as the difference the plain error is 2 - 2c, c their cosine with it
        return 1 / max(1 - trial.error / 2, 0.5) ** 2 - 1
    if way.codec == TrellisLayout.codec:
        return STREAMS_LEAVE[way.options["bits"]]
    return trial.harm


def counterpart(way: Storage, cols: int) -> Storage | None:
    """Return the calibrated way of as many bits, None where there is none."""
    bits = way.options.get("bits")
    if way.codec == LOW_RANK and way.options["rank"]:
        return replace(way, quantizer=TWO_SIDED)
    if way.codec != AffineLayout.codec or not isinstance(bits, int) or bits > 6:
        return None
    if bits == 1:
        return SIGNS
    return calibrated(streams(bits), cols) if bits <= 4 else rounded(AffineLayout.codec, bits, 64)


def _size(way: Storage, tuned: Tensor, known: StatisticsSource) -> float | None:
    """Return the bytes of a whole difference, None where these are as many as of the way that it stands for."""
    if way.encoding != "raw" or way.codec == LOW_RANK:
        return None
    assert way.quantizer is not None
    how = way.quantizer, way.codec, way.options
    try:
        encoder = encoder_under(tuned.name, tuned.shape, how, known, lambda _: None)
    except UnsupportedError:
        return float("inf")
    return float(sum(part.length or 0 for part in encoder.parts))
