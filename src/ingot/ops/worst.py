"""What reports say of the tensor that lost most."""

from __future__ import annotations

from collections.abc import Mapping

from ingot.model.report import Figure, Line


def worst_figures(name: str, error: Mapping[str, float]) -> list[Figure]:
    """Return the figures that ``WORST`` names, from what ``core.stats.ErrorStats.summary`` gave."""
    return [
        Figure("worst", name, data=False),
        Figure("snr", error["snr_db"], "number", data=False),
        Figure("rms", error["rms"], "number", data=False),
        Figure("max_abs", error["max_abs"], "number", data=False),
    ]


WORST = (
    Line("worst tensor {worst}: SNR {snr} dB, RMS {rms}, max {max_abs}", "error"),
    Line("           (weight error is not quality: evaluate the model)"),
)
