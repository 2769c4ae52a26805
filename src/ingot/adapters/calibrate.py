"""Calibration: what a model's matrices multiply, over samples of its own or a text (``spec/calibration.md``)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from ingot.adapters.calibration import LENGTH, SAMPLES, CalibrateOptions, CalibrateReport
from ingot.adapters.evaluate import read_windows
from ingot.adapters.generate import positions, require_room, require_vocabulary
from ingot.adapters.model_source import AnyPath
from ingot.adapters.options import LoadOptions, Protocol
from ingot.adapters.samples import finite, samples_of, seeded
from ingot.adapters.transformers import load_model
from ingot.adapters.transformers_config import EXTRA
from ingot.adapters.transformers_tokenizer import load_tokenizer
from ingot.core.extras import require
from ingot.core.memory import anonymous_rss, available_ram, parse_size
from ingot.core.options import takes
from ingot.core.progress import Progress, ProgressCallback
from ingot.errors import IntegrityError, ResourceError, UsageError
from ingot.model.statistics import ABSMAX, COUNT, INPUTS, MODEL_KEY, OUTPUTS, SQUARES, VERSION, VERSION_KEY, Statistics
from ingot.model.tensor import Array
from ingot.ops.identity import content_id
from ingot.ops.imatrix import write_imatrix
from ingot.ops.open import open as open_checkpoint
from ingot.ops.save import save
from ingot.stores.table import location_of

OWN = "samples of the model"
_BATCH = 8  # windows that pass through the model together
_RESERVE = 256 << 20  # for what the passes themselves take


@takes(CalibrateOptions, "calibrate")
def calibrate(options: CalibrateOptions) -> CalibrateReport:
    """Take statistics of a causal model's matrices, and write them.

    The model is held in f32. Its matrices' second moments are summed for as many matrices at a time as ``max_ram``
    leaves room for, each such group in a pass of its own over all windows, and wait on disk.

    Returns
    -------
    CalibrateReport

    Raises
    ------
    UsageError
        ``eval.text``: no UTF-8, or fewer tokens than a window; ``calibrate.length``: more tokens than the model has
        positions for.
    UnsupportedError
        ``generate.no-head``: no language model.
    ResourceError
        ``calibrate.ram``: the ceiling has no room for one matrix's second moments.
    IntegrityError
        ``calibrate.value``: NaN or infinity on the way through the model.
    IngotError
        As ``load_model`` and ``ingot.save``.
    """
    started = time.perf_counter()
    taken = _take(options)
    save(options.out, taken.arrays, taken.metadata, format="safetensors", overwrite=options.overwrite)
    if options.imatrix is not None:
        with Statistics.open(options.out) as statistics, open_checkpoint(options.model) as checkpoint:
            write_imatrix(options.imatrix, statistics, checkpoint, overwrite=options.overwrite)
    return CalibrateReport(
        out=location_of(options.out),
        matrices=taken.matrices,
        tokens=taken.tokens,
        source=taken.metadata["source"],
        fisher=options.fisher,
        passes=taken.passes,
        size=sum(array.nbytes for array in taken.arrays.values()),
        seconds=round(time.perf_counter() - started, 3),
    )


def statistics_of(
    model: AnyPath, *, max_ram: int | str | None = None, progress: ProgressCallback | None = None
) -> Statistics:
    """Return the statistics that ``calibrate`` takes of samples, in memory, for a conversion that was given none."""
    taken = _take(CalibrateOptions(model, "", samples=SAMPLES, max_ram=max_ram, progress=progress))
    return Statistics.in_memory(taken.arrays, taken.metadata)


@dataclass(frozen=True, slots=True)
class _Taken:
    arrays: Mapping[str, Array]
    metadata: Mapping[str, str]
    matrices: int
    tokens: int
    passes: int


def _take(options: CalibrateOptions) -> _Taken:
    torch = require("torch", EXTRA)
    with open_checkpoint(options.model) as checkpoint:
        names, identity = frozenset(checkpoint), content_id(checkpoint)
    model = load_model(LoadOptions(options.model, dtype="f32"))
    require_room(model, 1, 0)
    length = _length(model, options)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    layers, head = _layers(torch, model, names), model.get_output_embeddings()
    groups = list(_groups(layers, head, options))
    sampling = int(options.text is None)
    progress = Progress((len(groups) + sampling) * options.samples * length, options.progress)
    with seeded(torch, options.seed):
        windows = _windows(torch, model, options, length, progress)
        arrays: dict[str, Array] = {}
        for group in groups:
            sums = {name: _Sums(torch, layer, gradients=options.fisher and layer is not head) for name, layer in group}
            _pass(torch, model, windows, dict(group), sums, options, progress)
            for name, each in sums.items():
                for field, array in each.arrays(name).items():
                    arrays[f"{name}:{field}"] = array if len(groups) == 1 else _parked(array)
            del sums
    metadata = {
        VERSION_KEY: VERSION,
        MODEL_KEY: identity,
        "source": OWN if options.text is None else f"text {location_of(options.text)}",
        "samples": str(len(windows)),
        "length": str(length),
        "seed": str(options.seed),
        "fisher": str(options.fisher).lower(),
    }
    return _Taken(arrays, metadata, len(layers), windows.numel(), len(groups))


def _length(model: Any, options: CalibrateOptions) -> int:
    most = positions(model)
    if options.length is None:
        return LENGTH if most is None else min(LENGTH, most)
    if most is not None and options.length > most:
        raise UsageError(
            f"expected windows of at most {most} tokens, which the model has positions for, found {options.length}",
            rule="calibrate.length",
        )
    return options.length


def _parked(array: Array) -> Array:
    """Return the array on disk, where it waits for the others without taking memory."""
    with TemporaryFile() as file:
        file.write(array.data)
        file.flush()
        return np.memmap(file, array.dtype, "r", shape=array.shape)


def _layers(torch: Any, model: Any, names: frozenset[str]) -> list[tuple[str, Any]]:
    """Return the linear layers whose weights are tensors of the checkpoint, by these tensors' names."""
    return [
        (f"{name}.weight", module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and f"{name}.weight" in names
    ]


def _groups(layers: Sequence[tuple[str, Any]], head: Any, options: CalibrateOptions) -> Iterator[list[tuple[str, Any]]]:
    """Cut the layers into groups whose second moments fit into memory together; a head, of the vocabulary, has no G."""
    ceiling = available_ram() // 2 if options.max_ram is None else parse_size(options.max_ram) - anonymous_rss()
    room = ceiling - _RESERVE
    group: list[tuple[str, Any]] = []
    size = 0
    for name, layer in layers:
        wanted = 4 * (layer.in_features**2 + (layer.out_features**2 if options.fisher and layer is not head else 0))
        if wanted > room:
            raise ResourceError(
                f"expected room for {wanted >> 20} MiB of second moments beside the model, found {max(room, 0) >> 20} "
                "MiB; raise --max-ram, or take --no-fisher",
                rule="calibrate.ram",
                where=name,
            )
        if group and size + wanted > room:
            yield group
            group, size = [], 0
        group.append((name, layer))
        size += wanted
    if group:
        yield group


def _windows(torch: Any, model: Any, options: CalibrateOptions, length: int, progress: Progress) -> Any:
    """Return the tokens to read: i64 [windows, length]."""
    if options.text is not None:
        protocol = Protocol(window=length, sequences=options.samples)
        windows = read_windows(load_tokenizer(options.model), options.text, protocol)
        require_vocabulary(model, windows)
        return windows
    return samples_of(torch, model, options.samples, length, progress)


class _Sums:
    """Second moments of one layer, as they add up."""

    def __init__(self, torch: Any, layer: Any, *, gradients: bool) -> None:
        rows, cols = layer.out_features, layer.in_features
        self._torch = torch
        self.inputs, self.weight = torch.zeros(cols, cols), 0.0
        self.outputs = torch.zeros(rows, rows) if gradients else None
        self.squares, self.absmax, self.count = torch.zeros(cols, dtype=torch.float64), torch.zeros(cols), 0

    def forward(self, inputs: Any) -> None:
        self.squares += inputs.square().sum(0, dtype=self._torch.float64)
        self.absmax = self._torch.maximum(self.absmax, inputs.abs().amax(0))
        self.count += len(inputs)

    def second(self, inputs: Any, gradients: Any | None) -> None:
        if gradients is None:
            self.inputs.addmm_(inputs.T, inputs)
            self.weight += len(inputs)
            return
        heavy = gradients.square().mean(1)
        self.inputs.addmm_((inputs * heavy[:, None]).T, inputs)
        self.weight += float(heavy.sum(dtype=self._torch.float64))
        if self.outputs is not None:
            self.outputs.addmm_(gradients.T, gradients)

    def arrays(self, name: str) -> dict[str, Array]:
        found = {
            INPUTS: (self.inputs / (self.weight or 1.0)).numpy(),
            SQUARES: (self.squares / max(self.count, 1)).float().numpy(),
            ABSMAX: self.absmax.numpy(),
            COUNT: np.array([self.count], np.int64),
        }
        if self.outputs is not None:
            found[OUTPUTS] = (self.outputs / max(self.count, 1)).numpy()
        if not all(np.isfinite(array).all() for array in found.values()):
            raise IntegrityError("calibrate.value", "expected finite activations, found NaN or infinity", where=name)
        return found


def _pass(
    torch: Any,
    model: Any,
    windows: Any,
    layers: Mapping[str, Any],
    sums: Mapping[str, _Sums],
    options: CalibrateOptions,
    progress: Progress,
) -> None:
    """Read all windows and add up what layers multiply and get back; each pass draws the same labels."""
    fisher = options.fisher
    torch.manual_seed(options.seed)
    hooks = [layer.register_forward_hook(_hook(sums[name], fisher=fisher)) for name, layer in layers.items()]
    embedding = model.get_input_embeddings()
    try:
        for first in range(0, len(windows), _BATCH):
            tokens = windows[first : first + _BATCH]
            with torch.set_grad_enabled(fisher):
                started = embedding(tokens).detach().requires_grad_(fisher)
                logits = model(inputs_embeds=started, use_cache=False).logits.flatten(0, 1)
                if fisher:
                    drawn = torch.multinomial(finite(torch, logits.detach()).softmax(-1), 1)[:, 0]
                    torch.nn.functional.cross_entropy(logits, drawn, reduction="sum").backward()
            progress.advance(tokens.numel(), "factors")
    finally:
        for hook in hooks:
            hook.remove()


def _hook(sums: _Sums, *, fisher: bool) -> Any:
    def forward(_: Any, arguments: Any, output: Any) -> None:
        inputs = arguments[0].detach().flatten(0, -2)
        sums.forward(inputs)
        if fisher:
            output.register_hook(lambda gradient: sums.second(inputs, gradient.detach().flatten(0, -2)))
        else:
            sums.second(inputs, None)

    return forward
