"""A view whose matrices are rounded by quantizers that know what they multiply; each when its bytes are asked for."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import numpy as np

from ingot.codecs.table import CODECS
from ingot.core.numeric.dtypes import FLOATS, cast
from ingot.core.runtime.parallel import default_workers
from ingot.model.bytesource import DerivedSource
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.affine import ZEROS
from ingot.model.layouts.dense import DenseLayout
from ingot.model.part import Part
from ingot.model.reading.view import derive_checkpoint
from ingot.model.tensor import Array, Tensor
from ingot.quantization.choice import QuantizerSpec
from ingot.quantization.rounding import multiply
from ingot.quantization.tensor import Outcome, StatisticsSource, matrices, require_finite, round_tensor, rounding_memory
from ingot.views.common import Make, mapping, require_known

Known = Callable[[], StatisticsSource]


@dataclass(frozen=True, slots=True)
class Rounding:
    """What is to be rounded, by which statistics, and what there is to tell once it was read.

    Parameters
    ----------
    choices : mapping of name to QuantizerSpec
    known : callable
        Returns the statistics; called when the first matrix is read.
    said : str
        What tells the statistics from others.
    close : callable, optional
        Releases the statistics, with the view.
    dtypes : mapping of name to str
        The element type that a rounded matrix states, where that is not the one it has before.
    more : callable, optional
        Returns further lines on what was done to the matrices before.
    outcomes : dict
        By matrix (experts of a stack as ``NAME:expert.N``), once it was rounded.
    corrected : dict
        By the name of a bias, once it was read: its largest change; None where no means of inputs are known.
    at_hand : bool
        The statistics are there, and may be asked before a matrix is read.
    """

    choices: Mapping[str, QuantizerSpec]
    known: Known
    said: str
    close: Callable[[], None] | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    more: Callable[[], Sequence[str]] | None = None
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    corrected: dict[str, float | None] = field(default_factory=dict)
    at_hand: bool = True


def round_to(checkpoint: Checkpoint, rounding: Rounding) -> Checkpoint:
    """Return the checkpoint with some matrices rounded; such a view cannot be sent to another process."""
    require_known(checkpoint, rounding.choices)
    choices, held = rounding.choices, _Held(default_workers() + 2)

    biases = {bias: name for name, asked in choices.items() if (bias := _bias_of(checkpoint, name, asked))}

    def work(name: str) -> _Work:
        return _Work(checkpoint[name], rounding, held)

    def made(name: str) -> Make | None:
        if name in biases:
            return lambda: _corrected(checkpoint[name], work(biases[name]), rounding)
        return (lambda: _tensor(work(name))) if name in choices else None

    entries = [(name, made(name), name) for name in checkpoint]
    text = {name: repr(asked) for name, asked in choices.items()}
    told = [rounding.said, text]
    return derive_checkpoint(
        checkpoint, mapping(entries, checkpoint), round_to, rounding, told, also_close=rounding.close
    )


class _Held:
    """Rounded matrices, the last few that were asked for: whoever stores a part will want the others."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Once] = OrderedDict()

    def entry(self, name: str) -> _Once:
        with self._lock:
            found = self._entries.setdefault(name, _Once())
            self._entries.move_to_end(name)
            while len(self._entries) > self.most:
                self._entries.popitem(last=False)
            return found


class _Once:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.parts: Mapping[str, memoryview] | None = None


class _Work:
    """One tensor's rounding."""

    def __init__(self, tensor: Tensor, rounding: Rounding, held: _Held) -> None:
        self.tensor = tensor
        self._held = held
        self.asked = rounding.choices[tensor.name]
        self._known = rounding.known
        self._outcomes = rounding.outcomes
        self._at_hand = rounding.at_hand
        self.layout = self.asked.layout(tensor.shape, rounding.dtypes.get(tensor.name, tensor.dtype))

    def part(self, role: str) -> memoryview:
        once = self._held.entry(self.tensor.name)
        with once.lock:
            if once.parts is None:
                once.parts = self._rounded()
            return once.parts[role]

    @property
    def memory(self) -> int:
        """Bytes that rounding takes, beside matrices that were rounded before it."""
        shape = self.tensor.shape
        first = next(name for name, _ in matrices(self.tensor.name, shape))
        known = self._known().for_matrix(first) if self._at_hand else None
        before = self._held.most * sum(int(spec.length or 0) for spec in self.layout.part_specs(shape))
        return rounding_memory(self.asked, shape, known) + self.tensor.nbytes + before

    def _rounded(self) -> Mapping[str, memoryview]:
        """Round the matrix, or those that lie stacked: each by its own statistics, all to the first one's table."""
        parts, outcomes = round_tensor(self.asked, _matrices(self.tensor), self._known())
        self._outcomes.update({outcome.matrix: outcome for outcome in outcomes})
        return {role: _bytes(array) for role, array in parts.items()}


def _matrices(tensor: Tensor) -> Iterator[tuple[str, Array]]:
    """Yield a tensor's matrices in f32 under the names of their statistics."""
    for name, place in matrices(tensor.name, tensor.shape):
        values = cast(tensor[place] if place else tensor.numpy(), "f32")
        require_finite(values, tensor.name)
        yield name, np.ascontiguousarray(values)


def _bias_of(checkpoint: Checkpoint, name: str, asked: QuantizerSpec) -> str | None:
    """Return the bias beside a matrix, where there is one and it is to be corrected."""
    bias = f"{name.removesuffix('weight')}bias"
    if not asked.correct_bias or not name.endswith(".weight") or bias not in checkpoint:
        return None
    tensor = checkpoint[bias]
    plain = tensor.codec == DenseLayout.codec and tensor.dtype in FLOATS
    return bias if plain and tensor.shape == checkpoint[name].shape[:1] else None


def _corrected(tensor: Tensor, work: _Work, rounding: Rounding) -> Tensor:
    """Return a bias plus what rounding took from the mean output: ``b + (W - Q) m``, m the means of the inputs."""
    part = Part(
        tensor.dtype, tensor.nbytes, _Bytes(_Bias(tensor, work, rounding), "data", tensor.nbytes), where=tensor.name
    )
    return replace(tensor, parts={"data": part}, source_bits=tensor.stored_bits)


class _Bias:
    """A corrected bias, made when its bytes are asked for."""

    def __init__(self, tensor: Tensor, work: _Work, rounding: Rounding) -> None:
        self.tensor = tensor
        self._work = work
        self._rounding = rounding

    @property
    def memory(self) -> int:
        """Bytes that the rounding of the matrix takes, and the difference to what it was."""
        return self._work.memory + 8 * self._work.tensor.size

    def part(self, role: str) -> memoryview:
        matrix = self._work.tensor
        values = cast(self.tensor.numpy(), "f32")
        known = self._rounding.known().for_matrix(matrix.name)
        means = None if known is None else known.means
        if means is None:
            self._rounding.corrected[self.tensor.name] = None
            return _bytes(self.tensor.numpy())
        lost = cast(matrix.numpy(), "f32") - _tensor(self._work).numpy("f32")
        more = multiply(lost, means[:, None])[:, 0]
        self._rounding.corrected[self.tensor.name] = float(np.abs(more).max(initial=0))
        return _bytes(cast(values + more, self.tensor.dtype))


def _bytes(array: Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _tensor(work: _Work) -> Tensor:
    tensor, layout = work.tensor, work.layout
    parts = {
        spec.role: Part(
            spec.dtype,
            int(spec.length or 0),
            _Bytes(work, spec.role, int(spec.length or 0), work.asked.points if spec.role == ZEROS else None),
            type=spec.type,
            where=f"{tensor.name}: {spec.role}",
        )
        for spec in layout.part_specs(tensor.shape)
    }
    return replace(
        tensor,
        dtype=layout.dtype,
        codec=layout.codec,
        parts=parts,
        params=layout.attributes(),
        decoder=CODECS[layout.codec],
        origin=None,
        decoded_from=tensor.decoded_from or tensor.codec,
        source_bits=tensor.stored_bits,
    )


class _Bytes(DerivedSource):
    """One part of a rounded tensor as a ``ByteSource``."""

    mapped = False

    def __init__(self, work: _Work | _Bias, role: str, size: int, integers: tuple[int, int] | None = None) -> None:
        self._work = work
        self._role = role
        self.size = size
        self.integers = integers
        self.name = work.tensor.name

    def view(self, offset: int, length: int) -> memoryview:
        return self._work.part(self._role)[offset : offset + length].toreadonly()

    def readinto(self, offset: int, out: memoryview) -> None:
        out.cast("B")[:] = self._work.part(self._role)[offset : offset + out.nbytes]

    def computing_bytes(self) -> int:
        """Return the memory that rounding takes."""
        return self._work.memory

    def memory_hint(self) -> str:
        return "calibrate with --largest, by which the largest second moments are left out"

    def changed(self) -> bool:
        return any(part.source.changed() for part in self._work.tensor.parts.values())

    def close(self) -> None:
        """Nothing to do: what is read belongs to the checkpoint."""

    def __reduce__(self) -> NoReturn:
        raise TypeError("rounded matrices are made where they are read")
