"""Rounding of a model's matrices during calibration: each layer is rounded as soon as its statistics are complete.

The statistics of a layer are deleted when its matrices are rounded, so that the statistics of the full model are never
stored. Rounded matrices are kept in the staging folder until the conversion writes them. A resumed run continues after
the last rounded layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ingot.artifacts.destination import CPU
from ingot.core.registry import Registry
from ingot.core.runtime.memory import anonymous_in_use, available_ram, parse_size
from ingot.core.runtime.parallel import default_workers, ordered
from ingot.errors import CodecError
from ingot.model.calibration import Calibration, LayerResult
from ingot.model.checkpoint import Checkpoint
from ingot.model.part import Part
from ingot.model.statistics import Statistics
from ingot.model.tensor import Array
from ingot.quantization.tensor import Outcome, rounding_memory
from ingot.views.rounded_view import Rounding, is_vocabulary

# Imported by name on first use, because ``ingot.runtime`` imports this package.
_CALIBRATIONS: Registry[Callable[..., Calibration]] = Registry(
    "calibration", (("model", "ingot.runtime.calibration.calibrate:calibration_of"),)
)


def calibration_of(model: Any, *, max_ram: int | str | None, progress: Any = None, device: Any = CPU) -> Calibration:
    """Return a calibration that will run over text that the model generates; needs torch."""
    return _CALIBRATIONS["model"](model, max_ram=max_ram, progress=progress, device=device)


def round_by_layers(
    rounded: Checkpoint,
    rounding: Rounding,
    calibration: Calibration,
    folder: Path,
    *,
    resume: bool,
    max_ram: int | str | None,
    threads: int | None,
) -> None:
    """Calibrate and round every matrix that has statistics; store the results in ``rounding.saved`` and ``.outcomes``.

    Parameters
    ----------
    rounded : Checkpoint
        The view that rounds matrices when they are read, with the names of the statistics.
    rounding : Rounding
        The quantizer of each matrix. ``replace_statistics`` must be set.
    calibration : Calibration
    folder : Path
        Contains the rounded matrices until the conversion is complete; created if it does not exist.
    resume : bool
        Whether an earlier run may have left layers in ``folder``.
    max_ram : int, str or None
        The maximum memory in bytes; None for half of the free memory.
    threads : int or None
        The maximum number of matrices that are rounded at the same time; None for one per processor.

    Raises the errors of ``Calibration.run_by_layers`` and of rounding.
    """
    assert rounding.replace_statistics is not None
    replace_statistics = rounding.replace_statistics
    costs = {
        name: rounding_memory(spec, rounded[name].shape, None, vocabulary=is_vocabulary(name)) + rounded[name].size * 4
        for name, spec in rounding.choices.items()
    }
    limit = available_ram() // 2 if max_ram is None else parse_size(max_ram)
    workers = threads or default_workers()

    def process(statistics: Statistics, store: Callable[[Array, str], None]) -> Mapping[str, Any]:
        names = _tensors_with(statistics, rounded, rounding)
        replace_statistics(statistics)
        before = set(rounding.outcomes)
        free = limit - anonymous_in_use()
        count = max(1, min(workers, free // max((costs[name] for name in names), default=1)))
        for name, parts in zip(names, ordered(lambda name: _parts(rounded, name), names, count), strict=True):
            for role, part in parts.items():
                store(part, _key(name, role))
        outcomes = [asdict(outcome) for name, outcome in rounding.outcomes.items() if name not in before]
        return {"tensors": names, "outcomes": outcomes}

    folder.mkdir(exist_ok=True)
    results = calibration.run_by_layers(
        process,
        str(folder),
        resume=resume,
        identity=_identity(rounding),
        reserve=max(costs.values(), default=0),
    )
    replace_statistics(results.statistics)
    for layer in results.layers:
        _restore(layer, rounded, rounding)


def _identity(rounding: Rounding) -> str:
    """Return a text with all inputs of rounding except the statistics."""
    device = [] if rounding.device is None else [rounding.device.type]
    return repr([sorted(rounding.choices.items()), sorted(rounding.dtypes.items()), *device])


def _tensors_with(statistics: Statistics, rounded: Checkpoint, rounding: Rounding) -> list[str]:
    """Return the names of the tensors to round that have statistics, or have experts with statistics, in order."""
    names = {name.partition(":expert.")[0] for name in statistics.names}
    return [name for name in rounded if name in rounding.choices and name in names]


def _parts(rounded: Checkpoint, name: str) -> dict[str, Array]:
    """Round a tensor; return its parts as bytes, keyed by role. Errors of rounding name the tensor."""
    parts = rounded[name].parts
    try:
        return _bytes_of(parts)
    except CodecError as error:
        raise error if error.where else error.add_location(name) from None


def _bytes_of(parts: Mapping[str, Part]) -> dict[str, Array]:
    return {role: np.frombuffer(part.source.view(0, part.source.size), np.uint8) for role, part in parts.items()}


def _restore(layer: LayerResult, rounded: Checkpoint, rounding: Rounding) -> None:
    for outcome in layer.record["outcomes"]:
        rounding.outcomes[outcome["matrix"]] = Outcome(**outcome)
    for name in layer.record["tensors"]:
        arrays = {role: layer.arrays[_key(name, role)] for role in rounded[name].parts}
        rounding.saved[name] = arrays


def _key(name: str, role: str) -> str:
    return f"{name}\n{role}"
