"""The passes of a calibration: a layer's weights, the activations of some windows and its sums are what is in memory.

Forward through all windows for each layer, activations on disk; then the head; then backward, each layer's activations
computed again from what went in (``spec/calibration.md``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ingot.core.runtime.progress import Progress
from ingot.errors import IntegrityError
from ingot.runtime.calibration.calibrate_layers import Group, Layered, addressed, grouped
from ingot.runtime.calibration.calibrate_work import Work, Writer
from ingot.runtime.calibration.moments import ApartError, Sums, heard, listening
from ingot.runtime.calibration.samples import finite
from ingot.runtime.calibration.skeleton import Layer
from ingot.runtime.layers.bf16_products import bf16_product

LOGITS = 1 << 24
"""Elements of the logits that are computed together: which tokens these are decides on what labels are drawn."""


@dataclass(slots=True)
class Passes:
    """All passes of one calibration.

    Parameters
    ----------
    model : Layered
    work : Work
    tokens : i64 [windows, length]
    batch : int
        Windows that pass through a layer together.
    room : callable
        Returns the bytes that there are for the sums of a layer.
    progress : Progress
        Of tokens through layers.
    """

    model: Layered
    work: Work
    tokens: Any
    batch: int
    room: Callable[[Layer], int]
    progress: Progress
    passes: int = field(default=0)
    same: dict[str, str] = field(default_factory=dict)
    """The matrix under which A stands, by those that multiply the same inputs."""
    _share: bool = field(default=True)
    _leaders: dict[str, str] = field(default_factory=dict)  # of the step that is taken

    @property
    def fisher(self) -> bool:
        return self.model.settings.fisher

    def run(self) -> dict[str, Any]:
        """Return all arrays by ``NAME:FIELD``, mapped."""
        count = len(self.model.layers)
        self._step("enter", 1, self._enter)
        for number in range(count):
            self._step(f"forward {number}", 1, partial(self._forward, number))
        self._step("leave", 1, self._leave)
        if self.fisher:
            for number in reversed(range(count)):
                self._step(f"backward {number}", 3, partial(self._backward, number))
            self._step("begin", 1, self._begin)
        found: dict[str, Any] = {}
        for step in self._steps():
            noted = self.work.found(step)
            if noted is not None and noted.get("index"):
                found |= self.work.arrays(_statistics(step), noted["index"])
                self.same |= noted.get("same", {})
        return found

    def _steps(self) -> list[str]:
        numbers = range(len(self.model.layers))
        return [
            "enter",
            "leave",
            "begin",
            *(f"{way} {number}" for way in ("forward", "backward") for number in numbers),
        ]

    def _step(self, name: str, weight: int, take: Callable[[], None]) -> None:
        if self.work.found(name) is None:
            try:
                take()
            except ApartError:  # its files begin anew
                self._share = False
                take()
        self.progress.advance(weight * self.tokens.numel(), name)

    def _batches(self) -> Iterator[tuple[int, Any]]:
        for first in range(0, len(self.tokens), self.batch):
            yield first, self.tokens[first : first + self.batch]

    def _read(self, name: str, first: int, windows: int) -> Any:
        length, width = int(self.tokens.shape[1]), self._hidden
        values = self.work.read(name, 4 * first * length * width, (windows, length, width))
        return self.model.torch.from_numpy(values)

    @property
    def _hidden(self) -> int:
        noted = self.work.found("enter")
        assert noted is not None
        return int(noted["width"])

    def _enter(self) -> None:
        model, out, width = self.model, self.work.writer(_inputs(0)), 0
        written = self._statistics("enter")
        with model.torch.no_grad(), model.listening_to([] if self.fisher else model.before, fisher=False) as sums:
            for _, tokens in self._batches():
                hidden = model.stack.enter(model.stack.embedded(tokens)).hidden
                width = hidden.shape[-1]
                out.add(_plain(hidden))
        self._add(written, sums)
        self._finish("enter", written, [out], [], width=width)

    def _forward(self, number: int) -> None:
        layer, out = self.model.layers[number], self.work.writer(_inputs(number + 1))
        with self.model.torch.no_grad(), self.model.skeleton.loaded(layer):
            pieces = self.model.skeleton.pieces(layer)
            groups = [{}] if self.fisher else grouped(self.model.wanted(layer), self.room(layer))
            self.passes = max(self.passes, len(groups))
            known = addressed(pieces, [layer.module])
            written = self._statistics(f"forward {number}")
            for turn, group in enumerate(groups):
                sums = self._sums(group)
                with self._listening(known, sums):
                    for first, tokens in self._batches():
                        hidden = self._read(_inputs(number), first, len(tokens))
                        call = self.model.calls(tuple(tokens.shape))[number]
                        hidden = self.model.stack.layer(number, hidden, call)
                        if not turn:
                            out.add(_plain(hidden))
                self._add(written, sums)
        drop = [] if self.fisher else [_inputs(number)]
        self._finish(f"forward {number}", written, [out], drop)

    def _leave(self) -> None:
        """Run what stands behind the layers, and with gradients draw labels and begin to go back."""
        torch, model, count = self.model.torch, self.model, len(self.model.layers)
        torch.manual_seed(model.settings.seed)
        out = self.work.writer(_gradients(count)) if self.fisher else None
        written, head = self._statistics("leave"), model.of_head()
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.fisher))
            sums = stack.enter_context(model.listening_to(model.behind, fisher=self.fisher))
            if head is not None and model.head is not None:
                sums[head.name] = Sums(torch, head, fisher=self.fisher)
                hook = _hook(sums[head.name], head.rows, fisher=self.fisher)
                stack.callback(model.head.module.register_forward_hook(hook).remove)
            for first, tokens in self._batches():
                gradient = self._ends(self._read(_inputs(count), first, len(tokens)))
                if out is not None:
                    out.add(_plain(gradient))
        self._add(written, sums)
        self._finish("leave", written, [] if out is None else [out], [_inputs(count)])

    def _ends(self, hidden: Any) -> Any:
        """Return the gradients at the last layer's output of some windows."""
        torch, model = self.model.torch, self.model
        if model.head is None:
            return _of_encoder(torch, model, hidden, fisher=self.fisher)
        flat = hidden.flatten(0, 1)
        step = max(1, LOGITS // max(1, model.head.tensor.shape[0] if self.fisher else model.width))
        gradients = []
        for first in range(0, len(flat), step):
            # Each token by itself: what stands behind the layers looks at no other, and has no position to run out of.
            some = flat[first : first + step, None].requires_grad_(self.fisher)
            logits = model.stack.leave(some, model.width, headless=not self.fisher).logits.flatten(0, 1)
            finite(torch, logits.detach())
            if self.fisher:
                drawn = torch.multinomial(logits.detach().softmax(-1), 1)[:, 0]
                torch.nn.functional.cross_entropy(logits, drawn, reduction="sum").backward()
                gradients.append(some.grad[:, 0])
        return torch.cat(gradients).view_as(hidden) if self.fisher else None

    def _backward(self, number: int) -> None:
        layer, out = self.model.layers[number], self.work.writer(_gradients(number))
        with self.model.torch.enable_grad(), self.model.skeleton.loaded(layer):
            pieces = self.model.skeleton.pieces(layer)
            groups = grouped(self.model.wanted(layer), self.room(layer))
            self.passes = max(self.passes, len(groups))
            written = self._statistics(f"backward {number}")
            for turn, group in enumerate(groups):
                sums = self._sums(group)
                for first, tokens in self._batches():
                    hidden = self._read(_inputs(number), first, len(tokens)).requires_grad_()
                    call = self.model.calls(tuple(tokens.shape))[number]
                    with self._listening(addressed(pieces, [layer.module]), sums):
                        made = self.model.stack.layer(number, hidden, call)
                    made.backward(self._read(_gradients(number + 1), first, len(tokens)))
                    if not turn:
                        out.add(_plain(hidden.grad))
                    del made, hidden
                self._add(written, sums)
        self._finish(f"backward {number}", written, [out], [_inputs(number), _gradients(number + 1)])

    def _begin(self) -> None:
        """Go back through what stands before the layers, where matrices do."""
        model, written = self.model, self._statistics("begin")
        if model.before:
            with model.torch.enable_grad(), model.listening_to(model.before, fisher=True) as sums:
                for first, tokens in self._batches():
                    started = model.stack.embedded(tokens).detach().requires_grad_()
                    hidden = model.stack.enter(started, with_gradients=True).hidden
                    hidden.backward(self._read(_gradients(0), first, len(tokens)))
            self._add(written, sums)
        self._finish("begin", written, [], [_gradients(0)])

    def _sums(self, group: Group) -> dict[str, Sums]:
        return {name: Sums(self.model.torch, each, fisher=self.fisher) for name, each in group.items()}

    def _listening(self, pieces: Mapping[int, Any], sums: Mapping[str, Sums]) -> AbstractContextManager[None]:
        """Add up what a layer's matrices multiply."""
        if not sums:
            return nullcontext()
        product = None if self.fisher else bf16_product(self.model.torch)
        return listening(pieces, sums, fisher=self.fisher, share=self._share, product=product)

    def _statistics(self, step: str) -> Writer:
        return self.work.writer(_statistics(step))

    def _add(self, written: Writer, sums: dict[str, Sums]) -> None:
        for name in [*sums]:
            each = sums.pop(name)
            if each.same is not None:
                self._leaders[name] = each.same
            if each.told:
                for key, array in each.arrays(self.tokens.numel()).items():
                    written.add(array, f"{name}:{key}")

    def _finish(self, step: str, written: Writer, files: Sequence[Writer], drop: Sequence[str], **more: Any) -> None:
        same, self._leaders = self._leaders, {}
        self.work.finish(step, [written, *files], drop, index=written.index, same=same, **more)


def _hook(sums: Sums, rows: int, *, fisher: bool) -> Any:
    return lambda _, arguments, output: heard(sums, arguments[0], output, slice(0, rows), fisher=fisher)


def _of_encoder(torch: Any, model: Layered, hidden: Any, *, fisher: bool) -> Any:
    """Return the gradients of ``v . e`` for v normal and e the mean of a window's outputs, of length 1.

    Were e what a normal distribution of variance 1 stands around, these were those of its log-likelihood at a vector
    drawn from it: the second moment of v is the identity, so G is that of the squared distance of embeddings.
    """
    hidden.requires_grad_(fisher)
    out = model.stack.leave(hidden, model.width).last_hidden_state
    if not torch.isfinite(out.detach()).all():
        raise IntegrityError("calibrate.value", "expected finite outputs, found NaN or infinity: weights are damaged")
    if not fisher:
        return None
    found = torch.nn.functional.normalize(out.mean(1), dim=-1)
    (found * torch.randn(found.shape)).sum().backward()
    return hidden.grad


def _plain(hidden: Any) -> np.ndarray[Any, np.dtype[Any]]:
    values: np.ndarray[Any, np.dtype[Any]] = hidden.detach().numpy()
    return values


def _inputs(number: int) -> str:
    return f"layer-{number:04}.inputs"


def _gradients(number: int) -> str:
    return f"layer-{number:04}.gradients"


def _statistics(step: str) -> str:
    return f"{step.replace(' ', '-')}.statistics"
