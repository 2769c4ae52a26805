"""The calibration of a model as an object that runs later: at once, or layer by layer without a statistics file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ingot.model.statistics import Statistics
from ingot.model.tensor import Array

ProcessLayer = Callable[[Statistics, Callable[[Array, str], None]], Mapping[str, Any]]
"""A callback for a layer. It receives the layer's statistics, and a function that stores an array under a key.

It returns a JSON object. The statistics are deleted after the call."""


@dataclass(frozen=True, slots=True)
class LayerResult:
    """The object that ``ProcessLayer`` returned for a layer, and functions that read its stored arrays, by key."""

    record: Mapping[str, Any]
    arrays: Mapping[str, Callable[[], Array]]


@dataclass(frozen=True, slots=True)
class LayerResults:
    """The results of all layers, and the statistics of all matrices.

    These statistics contain only the diagonals of the second moments.
    """

    statistics: Statistics
    layers: Sequence[LayerResult]


class CalibrationEstimate(Protocol):
    """Estimates for a calibration: seconds, and the largest number of bytes of memory and of disk in use."""

    @property
    def seconds(self) -> float: ...

    @property
    def memory(self) -> int: ...

    @property
    def disk(self) -> int: ...


class Calibration(ABC):
    """A calibration of a model."""

    @property
    def source(self) -> str:
        """The input of the model, for reports."""
        return "samples of the model"

    def plan(self) -> CalibrationEstimate | None:
        """Return estimates for a run, measured on a few windows of tokens, or None if they cannot be measured."""
        return None

    @abstractmethod
    def collect(self) -> Statistics:
        """Return the statistics of all matrices, mapped from temporary files."""

    @abstractmethod
    def run_by_layers(
        self, process: ProcessLayer, folder: str, *, resume: bool, identity: str, reserve: int
    ) -> LayerResults:
        """Call ``process`` with the statistics of each layer as soon as they are complete, and return its results.

        Parameters
        ----------
        process : callable
        folder : str
            An existing folder for the activations and the results; the caller deletes it.
        resume : bool
            Whether to continue after the last layer that an earlier run finished in this folder.
        identity : str
            A text that changes if anything changes that determines the results, except the calibration.
        reserve : int
            Bytes of memory that ``process`` needs.

        Raises
        ------
        UsageError
            ``resume.changed``: the earlier run had other inputs or another identity.
        """
