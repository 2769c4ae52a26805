"""Estimate the time of a calibration: run each step on a few windows and one layer, and scale the result.

The steps and their memory are those of the calibration. A step takes a fixed time, such as for loading a layer, and a
time per batch of windows. Both times are computed from two measured runs: with one batch and with two batches.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ingot.core.runtime.device import synchronize
from ingot.core.runtime.progress import Progress
from ingot.runtime.calibration.calibrate_layers import LayerwiseModel
from ingot.runtime.calibration.calibrate_passes import Passes, gradients_file, inputs_file
from ingot.runtime.calibration.calibrate_plan import MemoryPlan, active_size
from ingot.runtime.calibration.calibrate_work import Work, Writer
from ingot.runtime.calibration.samples import BATCH, draw_token, first_tokens, seeded
from ingot.runtime.evaluation.generate import vocabulary_size
from ingot.stores.temporary import temporary_folder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ingot.model.tensor import Array

_ENOUGH = 0.5
"""A measurement of at least this number of seconds is not repeated."""
_REPEATS = 5
_TYPES = 3  # types of layers that are measured; further types are scaled by their products
_GRADIENT = 1e-3
_SEED = 0

clock = time.perf_counter
"""The clock of all measurements, in seconds."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The seconds of a step: a fixed time, and a time per batch of windows."""

    fixed: float
    batch: float

    def seconds(self, batches: float) -> float:
        """Return the seconds of the step for a number of batches."""
        return self.fixed + self.batch * batches


def calibration_seconds(model: LayerwiseModel, plan: MemoryPlan, tokens: Any, prefix: Sequence[int]) -> float:
    """Return the seconds that a calibration takes, estimated from measurements with the model's layers.

    Parameters
    ----------
    model : LayerwiseModel
        ``model.keep`` must have been called if the plan keeps the model in memory.
    plan : MemoryPlan
    tokens : i64 [windows, length] or None
        None if the model samples its text itself.
    prefix : sequence of int
        The tokens with which each sample begins.
    """
    torch = model.torch
    with seeded(torch, _SEED), temporary_folder() as folder:
        loading = _loading_seconds(model) if plan.in_memory else 0.0
        sampling = _sampling_seconds(model, plan, prefix, folder) if plan.sampling else 0.0
        if tokens is None:
            tokens = torch.randint(vocabulary_size(model.skeleton.model), (2 * plan.batch, plan.length))
        steps = _Steps(model, plan, tokens, folder)
        return loading + sampling + steps.seconds(plan.windows / steps.batch)


def _loading_seconds(model: LayerwiseModel) -> float:
    """Return the seconds to load all layers: the measured time of the first layer, scaled by the bytes of all
    layers.
    """
    skeleton = model.skeleton
    first = model.layers[0]
    started = clock()
    with skeleton.loaded(first):
        seconds = clock() - started
    return float(seconds * sum(map(skeleton.nbytes, model.layers)) / max(skeleton.nbytes(first), 1))


def _sampling_seconds(model: LayerwiseModel, plan: MemoryPlan, prefix: Sequence[int], folder: str) -> float:
    """Return the seconds of sampling: the time of one token with a half-full cache, times the number of tokens."""
    torch = model.torch
    count = min(BATCH, plan.windows)
    with torch.no_grad(), model.streaming() as streamed:
        start = first_tokens(torch, streamed, count, prefix)
        started = clock()
        last, cache = draw_token(torch, streamed, start, None, model.device)
        first = clock() - started
        _fill(cache, plan.length // 2)

        def step() -> float:
            nonlocal last, cache
            started = clock()
            last, cache = draw_token(torch, streamed, last, cache, model.device)
            return clock() - started

        repeated = _typical(step, warm=first < _ENOUGH)
    batches = -(-plan.windows // BATCH)
    return float(batches * (first + repeated * max(plan.length - start.shape[1] - 1, 0)))


def _fill(cache: Any, length: int) -> None:
    """Extend a cache of one token to ``length`` tokens; leave it unchanged if a layer does not cache all tokens."""
    layers = getattr(cache, "layers", [])
    if any(type(layer).__name__ != "DynamicLayer" or not layer.is_initialized for layer in layers):
        return
    for layer in layers:
        layer.keys, layer.values = (
            states[..., -1:, :].expand(*states.shape[:-2], max(length, 1), -1).clone()
            for states in (layer.keys, layer.values)
        )


def _typical(run: Callable[[], float], *, warm: bool) -> float:
    """Return the median of the seconds that several calls of ``run`` return; a long call is not repeated.

    If ``warm`` is set, ``run`` is called once before, so that memory is allocated outside the measured calls.
    """
    if warm:
        run()
    seconds: list[float] = []
    while len(seconds) < _REPEATS and sum(seconds) < _ENOUGH:
        seconds.append(run())
    return sorted(seconds)[len(seconds) // 2]


class _ShortWriter(Writer):
    """A writer whose file contains only the latest array, so that statistics need little disk."""

    def add(self, array: Array, key: str = "") -> None:
        self._size = 0
        super().add(array, key)


class _ShortWork(Work):
    """Files of a measurement; files with statistics contain only the latest array."""

    def writer(self, name: str) -> Writer:
        return (_ShortWriter if name.endswith(".statistics") else Writer)(self._target, name)


class _Steps(Passes):
    """The steps of a calibration on one or two batches of windows, timed one by one."""

    def __init__(self, model: LayerwiseModel, plan: MemoryPlan, tokens: Any, folder: str) -> None:
        self._files = _ShortWork(folder)
        batch = min(plan.batch, len(tokens))
        super().__init__(model, self._files, tokens[:batch], batch, plan.moment_bytes, Progress(0, None))
        self._all = tokens[: 2 * batch]
        self._enter()
        embedded = self._read(inputs_file(0), 0, batch).numpy()
        # the embeddings' values would lead to products with slow subnormal numbers in a tied head
        normal = np.random.default_rng(_SEED).standard_normal(embedded.shape, np.float32)
        self._inputs: Array = normal * embedded.std()

    @property
    def _sums_tied_embedding(self) -> bool:
        """False: the head's statistics do not wait in a file, because only one run of a step could read it."""
        return False

    def seconds(self, batches: float) -> float:
        """Return the seconds of all steps for a number of batches."""
        count = len(self.model.layers)
        total = self._cost(self._enter, {}).seconds(batches)
        total += self._layers(partial(self._layer_cost, batches))
        total += self._cost(self._leave, {inputs_file(count): False}).seconds(batches)
        if self.fisher:
            total += self._cost(self._begin, {gradients_file(0): True}).seconds(batches)
        return total

    def _layers(self, seconds: Callable[[int], float]) -> float:
        """Return the seconds of all layers, from a measurement of one layer of each frequent type."""
        types = [repr(self.model.shapes(layer)) for layer in self.model.layers]
        counts = Counter(types)
        measured = {name: types.index(name) for name, _ in counts.most_common(_TYPES)}
        costs = {name: seconds(index) for name, index in measured.items()}
        products = {
            name: max(active_size(self.model, self.model.layers[types.index(name)], products=True), 1)
            for name in counts
        }
        rate = sum(costs.values()) / sum(products[name] for name in costs)
        return sum(number * costs.get(name, rate * products[name]) for name, number in counts.items())

    def _layer_cost(self, batches: float, index: int) -> float:
        seconds = self._cost(partial(self._forward, index), {inputs_file(index): False}).seconds(batches)
        if self.fisher:
            files = {inputs_file(index): False, gradients_file(index + 1): True}
            seconds += self._cost(partial(self._backward, index), files).seconds(batches)
        return seconds

    def _cost(self, compute: Callable[[], None], files: Mapping[str, bool]) -> Cost:
        """Return the cost of a step that reads ``files``; the value True marks files with gradients."""
        windows = len(self._all)
        run = partial(self._run, compute, files)
        first = run(self.batch)
        if first < _ENOUGH:
            first = _typical(partial(run, self.batch), warm=False)
        if windows == self.batch:
            return Cost(0.0, first)
        both = _typical(partial(run, windows), warm=False)
        share = windows / self.batch
        batch = max((both - first) / (share - 1), 0.0)
        return Cost(first - batch, batch) if 0 < batch <= first else Cost(0.0, both / share)

    def _run(self, compute: Callable[[], None], files: Mapping[str, bool], windows: int) -> float:
        """Return the seconds that a step takes for a number of windows."""
        self.tokens = self._all[:windows]
        hidden = np.concatenate([self._inputs] * -(-windows // len(self._inputs)))[:windows]
        for name, gradients in files.items():
            writer = self._files.writer(name)
            writer.add(hidden * np.float32(_GRADIENT) if gradients else hidden)
            writer.end()
        started = clock()
        self.run_step(compute)
        synchronize(self.model.torch, self.model.device)
        return clock() - started
