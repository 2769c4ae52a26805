"""A view whose matrices are rounded by quantizers that know what they multiply; each when its bytes are asked for."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NoReturn

import numpy as np

from ingot.codecs.affine.word_rows import stream
from ingot.codecs.palette.rows import pack
from ingot.codecs.table import CODECS
from ingot.core.floats import cast
from ingot.core.parallel import default_workers, go_on
from ingot.errors import CodecError
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.affine import CODES
from ingot.model.layouts.scaled_codebook import CODEBOOK, INDICES, SCALES
from ingot.model.part import Part
from ingot.model.statistics import Statistics
from ingot.model.tensor import Array, Tensor
from ingot.model.view import derived
from ingot.ops.views.common import Make, mapping, require_known
from ingot.quantizers.choice import Asked
from ingot.quantizers.factors import Factors, factors_of, no_factors
from ingot.quantizers.grid import Grid, Rounded
from ingot.quantizers.rounding import error_under, round_matrix

Known = Callable[[], Statistics]


@dataclass(slots=True)
class Outcome:
    """What rounding did: by tensor the error under the statistics, and those that none were known of."""

    errors: dict[str, float] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Rounding:
    """What is to be rounded, by which statistics, and what there is to tell once it was read.

    Parameters
    ----------
    choices : mapping of name to Asked
    known : callable
        Returns the statistics; called when the first matrix is read.
    said : str
        What tells the statistics from others.
    close : callable, optional
        Releases the statistics, with the view.
    outcome : Outcome
    """

    choices: Mapping[str, Asked]
    known: Known
    said: str
    close: Callable[[], None] | None = None
    outcome: Outcome = field(default_factory=Outcome)


def round_to(checkpoint: Checkpoint, rounding: Rounding) -> Checkpoint:
    """Return the checkpoint with some matrices rounded; such a view cannot be sent to another process."""
    require_known(checkpoint, rounding.choices)
    choices, held = rounding.choices, _Held(default_workers() + 2)

    def made(name: str) -> Make:
        return lambda: _tensor(checkpoint[name], choices[name], _Work(checkpoint[name], rounding, held))

    entries = [(name, made(name) if name in choices else None, name) for name in checkpoint]
    text = {name: [asked.quantizer, repr(asked.grid)] for name, asked in choices.items()}
    told = [rounding.said, text]
    return derived(checkpoint, mapping(entries, checkpoint), round_to, rounding, told, rounding.close)


class _Held:
    """Rounded matrices, the last few that were asked for: whoever stores a part will want the others."""

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        self._entries: OrderedDict[str, _Once] = OrderedDict()

    def entry(self, name: str) -> _Once:
        with self._lock:
            found = self._entries.setdefault(name, _Once())
            self._entries.move_to_end(name)
            while len(self._entries) > self._most:
                self._entries.popitem(last=False)
            return found


class _Once:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.parts: Mapping[str, memoryview] | None = None


class _Work:
    """One tensor's rounding."""

    def __init__(self, tensor: Tensor, rounding: Rounding, held: _Held) -> None:
        self.tensor, self._held = tensor, held
        self._asked, self._known, self._outcome = rounding.choices[tensor.name], rounding.known, rounding.outcome

    def part(self, role: str) -> memoryview:
        once = self._held.entry(self.tensor.name)
        with once.lock:
            if once.parts is None:
                once.parts = self._rounded()
            return once.parts[role]

    def _rounded(self) -> Mapping[str, memoryview]:
        """Round the matrix, or those that lie stacked: each by its own statistics, all to the first one's table."""
        tensor, grid, found, errors = self.tensor, self._asked.grid, list[Rounded](), list[float]()
        for name, weights in _matrices(tensor):
            go_on()
            factors = self._factors(name, *weights.shape)
            levels = found[0].levels if found else None
            found.append(round_matrix(weights, grid, factors, self._asked.quantizer, levels))
            errors.append(error_under(weights, found[-1], factors))
        self._outcome.errors[tensor.name] = max(errors)
        parts = _stored(np.concatenate([each.codes for each in found]), found[0].levels, grid)
        scales = cast(np.concatenate([each.scales for each in found]), grid.scales)
        return {role: _bytes(array) for role, array in {**parts, SCALES: scales}.items()}

    def _factors(self, name: str, rows: int, cols: int) -> Factors:
        known = self._known().for_matrix(name)
        if known is None or not known.count:
            self._outcome.unknown.add(name)
            return no_factors(cols)
        known.require_shape(rows, cols)
        return factors_of(known)


def _matrices(tensor: Tensor) -> Iterator[tuple[str, Array]]:
    """Yield a tensor's matrices in f32 under the names of their statistics."""
    lead = tensor.shape[:-2]
    count = prod(lead)
    for number in range(count):
        index = tuple(map(int, np.unravel_index(number, lead))) if lead else ()
        values = cast(tensor[index] if index else tensor.numpy(), "f32")
        if not np.isfinite(values).all():
            raise CodecError(
                "quantizer.non-finite", "expected finite weights; keep this tensor dense", where=tensor.name
            )
        yield tensor.name if count == 1 else f"{tensor.name}:expert.{number}", np.ascontiguousarray(values)


def _stored(codes: Array, levels: Array, grid: Grid) -> dict[str, Array]:
    """Return all parts but the scales."""
    if grid.learnt:
        return {INDICES: pack(codes, grid.bits), CODEBOOK: levels.astype(np.float16)}
    signed = codes ^ np.uint8(1 << grid.bits - 1)  # two's complement
    # Rows begin at bytes. Those of whole bytes are one stream.
    return {CODES: stream(signed, grid.bits) if codes.shape[1] * grid.bits % 8 else pack(signed, grid.bits)}


def _bytes(array: Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _tensor(tensor: Tensor, asked: Asked, work: _Work) -> Tensor:
    layout = asked.layout(tensor.dtype)
    parts = {
        spec.role: Part(
            spec.dtype,
            int(spec.length or 0),
            _Bytes(work, spec.role, int(spec.length or 0)),
            type=spec.type,
            where=f"{tensor.name}: {spec.role}",
        )
        for spec in layout.part_specs(tensor.shape)
    }
    return Tensor(
        tensor.name, tensor.shape, tensor.dtype, layout.codec, parts, layout.attributes(), CODECS[layout.codec]
    )


class _Bytes:
    """One part of a rounded tensor as a ``ByteSource``."""

    mapped = False

    def __init__(self, work: _Work, role: str, size: int) -> None:
        self._work, self._role, self.size = work, role, size
        self.name = work.tensor.name

    def view(self, offset: int, length: int) -> memoryview:
        return self._work.part(self._role)[offset : offset + length].toreadonly()

    def readinto(self, offset: int, out: memoryview) -> None:
        out.cast("B")[:] = self._work.part(self._role)[offset : offset + out.nbytes]

    def changed(self) -> bool:
        return any(part.source.changed() for part in self._work.tensor.parts.values())

    def close(self) -> None:
        """Nothing to do: what is read belongs to the checkpoint."""

    def __reduce__(self) -> NoReturn:
        raise TypeError("rounded matrices are made where they are read")
