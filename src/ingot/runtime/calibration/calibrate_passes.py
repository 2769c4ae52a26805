"""The passes of a calibration. Memory holds a layer's weights, the activations of some windows and the layer's moments.

First, all windows run forward through each layer; activations go to disk. Then the head runs. Then layers run backward;
each computes its activations again from its stored input (``spec/calibration.md``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ingot.core.runtime.device import is_out_of_memory, no_device_memory, release_cached
from ingot.core.runtime.progress import Progress
from ingot.errors import IntegrityError
from ingot.model.calibration import LayerResult, ProcessLayer
from ingot.model.statistics import COUNT, INPUTS, SAME, SQUARES, Statistics
from ingot.model.tensor import Array
from ingot.runtime.calibration.calibrate_layers import Group, LayerwiseModel, by_address, group_by_size
from ingot.runtime.calibration.calibrate_work import Work, Writer
from ingot.runtime.calibration.moments import (
    InputsDivergedError,
    Moment,
    MomentSpec,
    Sums,
    record_product,
    record_products,
    start_moment,
)
from ingot.runtime.calibration.samples import draw, require_finite
from ingot.runtime.calibration.skeleton import Layer
from ingot.runtime.layers.bf16_products import bf16_product

LOGITS = 1 << 24
"""Elements of logits that are computed at once. The value affects which labels are drawn."""
_MAX_DIVISOR = 64
_TIED_HEAD = "tied-head.statistics"


@dataclass(slots=True)
class Passes:
    """The passes of one calibration over all windows, which sum the moments of all matrices.

    Parameters
    ----------
    model : LayerwiseModel
    work : Work
    tokens : i64 [windows, length]
    batch : int
        Windows that pass through a layer together.
    moment_bytes : callable
        Returns the number of bytes available for the moments of a layer.
    progress : Progress
        Counts tokens times layers.
    process : callable, optional
        Called with the statistics of each step. Afterwards, matrices among the statistics are deleted; only vectors
        stay.
    """

    model: LayerwiseModel
    work: Work
    tokens: Any
    batch: int
    moment_bytes: Callable[[Layer], int]
    progress: Progress
    process: ProcessLayer | None = None
    passes: int = field(default=0)
    same: dict[str, str] = field(default_factory=dict)
    """For each matrix that shares its inputs with others: the name of the matrix under which their A is stored."""
    _share: bool = field(default=True)
    _divisor: int = field(default=1)  # divides the bytes for moments, if a device has too little memory
    _leaders: dict[str, str] = field(default_factory=dict)  # entries of ``same`` of the current step

    @property
    def fisher(self) -> bool:
        return self.model.settings.fisher

    def run(self) -> dict[str, Any]:
        """Run all unfinished passes; return the arrays by ``NAME:FIELD``, mapped from files.

        With ``process``, only vectors are returned.
        """
        count = len(self.model.layers)
        self._step("enter", 1, self._enter)
        for index in range(count):
            self._step(f"forward {index}", 1, partial(self._forward, index))
        self._step("leave", 1, self._leave)
        if self.fisher:
            for index in reversed(range(count)):
                self._step(f"backward {index}", 3, partial(self._backward, index))
            self._step("begin", 1, self._begin)
        arrays: dict[str, Any] = {}
        for step in self._steps():
            record = self.work.finished(step)
            if record is None or not record.get("index"):
                continue
            processed = self.work.finished(_processing(step))
            if processed is not None:
                arrays |= self.work.arrays(_vectors(step), processed["vectors"])
            else:
                arrays |= self.work.arrays(_statistics(step), record["index"])
                self.same |= record.get("same", {})
        return arrays

    def results(self) -> list[LayerResult]:
        """Return the result of ``process`` for each step, with functions that read the arrays that the step stored."""
        results = []
        for step in self._steps():
            record = self.work.finished(_processing(step))
            if record is not None:
                arrays = {key: self._reader(_results(step), entry) for key, *entry in record["results"]}
                results.append(LayerResult(record["record"], arrays))
        return results

    def _reader(self, file: str, entry: Sequence[Any]) -> Callable[[], Array]:
        dtype, shape, offset = entry
        return lambda: self.work.read(file, offset, tuple(shape), np.dtype(dtype))

    def _process_statistics(self, step: str) -> None:
        """Pass the statistics of a step to ``process``; then delete them, except for vectors, and store the result."""
        record = self.work.finished(step)
        if self.process is None or record is None or not record.get("index"):
            return
        if self.work.finished(_processing(step)) is not None:
            return
        arrays = self.work.arrays(_statistics(step), record["index"])
        same = {f"{name}:{SAME}": same_as for name, same_as in record.get("same", {}).items()}
        vectors = self.work.writer(_vectors(step))
        for key, array in arrays.items():
            if array.ndim == 1:
                vectors.add(array, key)
        results = self.work.writer(_results(step))
        values = self.process(Statistics.in_memory(arrays, same), results.add)
        self.work.finish(
            _processing(step),
            [vectors, results],
            [_statistics(step)],
            vectors=vectors.index,
            results=results.index,
            record=values,
        )

    def _steps(self) -> list[str]:
        indices = range(len(self.model.layers))
        return [
            "enter",
            "leave",
            "begin",
            *(f"{direction} {index}" for direction in ("forward", "backward") for index in indices),
        ]

    def _step(self, name: str, weight: int, compute: Callable[[], None]) -> None:
        if self.work.finished(name) is None:
            self.run_step(compute)
        self._process_statistics(name)
        self.progress.advance(weight * self.tokens.numel(), name)

    def run_step(self, compute: Callable[[], None]) -> None:
        """Run a step; if it fails, repeat it with other settings.

        If matrices that shared sums got different inputs, sums are not shared. If the device has too little memory,
        fewer windows or moments are computed at once.
        """
        while True:
            try:
                return compute()
            except InputsDivergedError:  # run the step again without sharing
                self._share = False
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if not self._take_less():
                    raise no_device_memory(self.model.device, error) from error
            self._leaders = {}
            release_cached(self.model.torch, self.model.device)

    def _take_less(self) -> bool:
        """Halve the windows per batch, else the bytes for moments; return False if neither can be halved."""
        if self.batch > 1:
            self.batch //= 2
            return True
        self._divisor *= 2
        return self._divisor <= _MAX_DIVISOR

    def _groups(self, layer: Layer) -> list[Group]:
        """Return groups of a layer's matrices; the moments of a group are summed in one pass."""
        specs = self.model.moment_specs(layer)
        max_bytes = self.moment_bytes(layer)
        if self._divisor > 1:
            max_bytes = max(max_bytes // self._divisor, max((spec.nbytes for spec in specs), default=0))
        return group_by_size(specs, max_bytes)

    def _batches(self) -> Iterator[tuple[int, Any]]:
        for first in range(0, len(self.tokens), self.batch):
            yield first, self.tokens[first : first + self.batch].to(self.model.device)

    def _read(self, name: str, first: int, windows: int) -> Any:
        length = int(self.tokens.shape[1])
        width = self._hidden
        values = self.work.read(name, 4 * first * length * width, (windows, length, width))
        return self.model.torch.from_numpy(values).to(self.model.device)

    @property
    def _hidden(self) -> int:
        record = self.work.finished("enter")
        assert record is not None
        return int(record["width"])

    def _enter(self) -> None:
        model = self.model
        out = self.work.writer(inputs_file(0))
        width = 0
        written = self._statistics("enter")
        with model.torch.no_grad(), model.listening_to([] if self.fisher else model.before, fisher=False) as sums:
            for _, tokens in self._batches():
                hidden = model.stack.enter(model.stack.embedded(tokens)).hidden
                width = hidden.shape[-1]
                out.add(_plain(hidden))
        self._add(written, sums)
        self._finish("enter", written, [out], [], width=width)

    def _forward(self, index: int) -> None:
        layer = self.model.layers[index]
        out = self.work.writer(inputs_file(index + 1))
        with self.model.torch.no_grad(), self.model.skeleton.loaded(layer):
            matrices = self.model.skeleton.matrices(layer)
            groups = [{}] if self.fisher else self._groups(layer)
            self.passes = max(self.passes, len(groups))
            addresses = by_address(matrices, [layer.module])
            written = self._statistics(f"forward {index}")
            for group_index, group in enumerate(groups):
                sums = self._sums(group)
                with self._listening(addresses, sums):
                    for first, tokens in self._batches():
                        hidden = self._read(inputs_file(index), first, len(tokens))
                        call = self.model.calls(tuple(tokens.shape))[index]
                        hidden = self.model.stack.layer(index, hidden, call)
                        if not group_index:
                            out.add(_plain(hidden))
                self._add(written, sums)
        drop = [] if self.fisher else [inputs_file(index)]
        self._finish(f"forward {index}", written, [out], drop)

    def _leave(self) -> None:
        """Run the modules after the layers and sum the moments of their matrices.

        With gradients, draw the labels and begin the backward pass.
        """
        torch = self.model.torch
        model = self.model
        count = len(self.model.layers)
        torch.manual_seed(model.settings.seed)
        out = self.work.writer(gradients_file(count)) if self.fisher else None
        written = self._statistics("leave")
        head = model.head_spec()
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.fisher))
            sums = stack.enter_context(model.listening_to(model.after, fisher=self.fisher))
            if head is not None and model.head is not None:
                sums[head.name] = Sums(torch, head, fisher=self.fisher, device=model.device)
                hook = _hook(sums[head.name], head.rows, fisher=self.fisher)
                stack.callback(model.head.module.register_forward_hook(hook).remove)
            for first, tokens in self._batches():
                gradient = self._ends(self._read(inputs_file(count), first, len(tokens)))
                if out is not None:
                    out.add(_plain(gradient))
        files = [] if out is None else [out]
        tied: dict[str, Any] = {}
        if head is not None and self._sums_tied_embedding:
            tied_head = sums.pop(head.name)
            file = self.work.writer(_TIED_HEAD)
            for key, array in tied_head.arrays(self.tokens.numel()).items():
                file.add(array, key)
            tied = {"tied_head": file.index, "head_weight": tied_head.weight * head.rows / self.tokens.numel()}
            files.append(file)
        self._add(written, sums)
        self._finish("leave", written, files, [inputs_file(count)], **tied)

    def _ends(self, hidden: Any) -> Any:
        """Return the gradients with respect to ``hidden``, the output of the last layer for some windows."""
        torch = self.model.torch
        model = self.model
        if model.head is None:
            return _encoder_gradients(torch, model, hidden, fisher=self.fisher)
        flat = hidden.flatten(0, 1)
        step = max(1, LOGITS // max(1, model.head.tensor.shape[0] if self.fisher else model.width))
        gradients = []
        for first in range(0, len(flat), step):
            # One sequence per token: modules after the layers mix no tokens, and positions cannot exceed the maximum.
            batch = flat[first : first + step, None].requires_grad_(self.fisher)
            logits = model.stack.leave(batch, model.width, headless=not self.fisher).logits.flatten(0, 1)
            require_finite(torch, logits.detach())
            if self.fisher:
                drawn = draw(torch, logits.detach().softmax(-1))[:, 0]
                torch.nn.functional.cross_entropy(logits, drawn, reduction="sum").backward()
                gradients.append(batch.grad[:, 0])
        return torch.cat(gradients).view_as(hidden) if self.fisher else None

    def _backward(self, index: int) -> None:
        layer = self.model.layers[index]
        out = self.work.writer(gradients_file(index))
        with self.model.torch.enable_grad(), self.model.skeleton.loaded(layer):
            matrices = self.model.skeleton.matrices(layer)
            groups = self._groups(layer)
            self.passes = max(self.passes, len(groups))
            written = self._statistics(f"backward {index}")
            for group_index, group in enumerate(groups):
                sums = self._sums(group)
                for first, tokens in self._batches():
                    hidden = self._read(inputs_file(index), first, len(tokens)).requires_grad_()
                    call = self.model.calls(tuple(tokens.shape))[index]
                    with self._listening(by_address(matrices, [layer.module]), sums):
                        output = self.model.stack.layer(index, hidden, call)
                    output.backward(self._read(gradients_file(index + 1), first, len(tokens)))
                    if not group_index:
                        out.add(_plain(hidden.grad))
                    del output, hidden
                self._add(written, sums)
        self._finish(f"backward {index}", written, [out], [inputs_file(index), gradients_file(index + 1)])

    def _begin(self) -> None:
        """Backpropagate through the modules before the layers, and sum the moment of the embedding."""
        model = self.model
        written = self._statistics("begin")
        spec = model.embedding_spec()
        moment = None if spec is None else start_moment(model.torch, spec.cols, model.device)
        if model.before or moment is not None:
            with model.torch.enable_grad(), model.listening_to(model.before, fisher=True) as sums:
                for first, tokens in self._batches():
                    started = model.stack.embedded(tokens).detach().requires_grad_()
                    hidden = model.stack.enter(started, with_gradients=True).hidden
                    gradient = self._read(gradients_file(0), first, len(tokens))
                    (gradient,) = model.torch.autograd.grad(hidden, started, gradient)
                    if moment is not None:
                        moment.add(gradient.flatten(0, 1))
            self._add(written, sums)
        if spec is not None and moment is not None:
            for key, array in self._embedding_arrays(spec, moment).items():
                written.add(array, f"{spec.name}:{key}")
        self._finish("begin", written, [], [gradients_file(0), *([_TIED_HEAD] if self._sums_tied_embedding else [])])

    @property
    def _sums_tied_embedding(self) -> bool:
        """Whether the head's statistics must wait for those of the embedding, because both are one tensor."""
        head = self.model.head_spec()
        embedding = self.model.embedding_spec() if self.fisher else None
        return head is not None and embedding is not None and head.name == embedding.name

    def _embedding_arrays(self, spec: MomentSpec, moment: Moment) -> dict[str, Any]:
        """Return the statistics of the embedding, by field.

        If the head is tied, they are the head's, with A plus the second moment of gradients divided by the head's
        weight.
        """
        scale = self.model.embedding_scale(self.tokens[:1])
        total = moment.mean(self.tokens.numel() / scale**2)
        if not np.isfinite(total.diagonal()).all():
            raise IntegrityError("calibrate.value", "expected finite gradients, found NaN or infinity", where=spec.name)
        record = self.work.finished("leave")
        if record is not None and "tied_head" in record:
            head = self.work.arrays(_TIED_HEAD, record["tied_head"])
            return {**head, INPUTS: head[INPUTS] + total / np.float32(record["head_weight"] or 1)}
        return {INPUTS: total, SQUARES: total.diagonal().copy(), COUNT: np.array([self.tokens.numel()], np.int64)}

    def _sums(self, group: Group) -> dict[str, Sums]:
        model = self.model
        return {name: Sums(model.torch, item, fisher=self.fisher, device=model.device) for name, item in group.items()}

    def _listening(self, matrices: Mapping[int, Any], sums: Mapping[str, Sums]) -> AbstractContextManager[None]:
        """Return a context that adds the moments of a layer's matrices to ``sums``."""
        if not sums:
            return nullcontext()
        on_cpu = self.model.device.type == "cpu"
        product = bf16_product(self.model.torch) if on_cpu and not self.fisher else None
        return record_products(matrices, sums, fisher=self.fisher, share=self._share, product=product)

    def _statistics(self, step: str) -> Writer:
        return self.work.writer(_statistics(step))

    def _add(self, written: Writer, sums: dict[str, Sums]) -> None:
        for name in [*sums]:
            item = sums.pop(name)
            if item.same is not None:
                self._leaders[name] = item.same
            if item.has_statistics:
                for key, array in item.arrays(self.tokens.numel()).items():
                    written.add(array, f"{name}:{key}")

    def _finish(self, step: str, written: Writer, files: Sequence[Writer], drop: Sequence[str], **more: Any) -> None:
        same = self._leaders
        self._leaders = {}
        self.work.finish(step, [written, *files], drop, index=written.index, same=same, **more)


def _hook(sums: Sums, rows: int, *, fisher: bool) -> Any:
    return lambda _, arguments, output: record_product(sums, arguments[0], output, slice(0, rows), fisher=fisher)


def _encoder_gradients(torch: Any, model: LayerwiseModel, hidden: Any, *, fisher: bool) -> Any:
    """Return the gradients of ``v . e`` for random normal v; e is the normalized mean of a window's outputs.

    If e is the mean of a normal distribution with variance 1, these are gradients of the log-likelihood of a vector
    drawn from this distribution. The second moment of v is the identity, so G measures the squared distance of
    embeddings.
    """
    hidden.requires_grad_(fisher)
    out = model.stack.leave(hidden, model.width).last_hidden_state
    if not torch.isfinite(out.detach()).all():
        raise IntegrityError("calibrate.value", "expected finite outputs, found NaN or infinity: weights are damaged")
    if not fisher:
        return None
    embeddings = torch.nn.functional.normalize(out.mean(1), dim=-1)
    (embeddings * torch.randn(embeddings.shape).to(embeddings.device)).sum().backward()
    return hidden.grad


def _plain(hidden: Any) -> np.ndarray[Any, np.dtype[Any]]:
    values: np.ndarray[Any, np.dtype[Any]] = hidden.detach().cpu().numpy()
    return values


def inputs_file(index: int) -> str:
    """Return the name of the file with the inputs of a layer."""
    return f"layer-{index:04}.inputs"


def gradients_file(index: int) -> str:
    """Return the name of the file with the gradients at the inputs of a layer."""
    return f"layer-{index:04}.gradients"


def _statistics(step: str) -> str:
    return f"{step.replace(' ', '-')}.statistics"


def _vectors(step: str) -> str:
    return f"{step.replace(' ', '-')}.vectors"


def _results(step: str) -> str:
    return f"{step.replace(' ', '-')}.results"


def _processing(step: str) -> str:
    return f"process {step}"
