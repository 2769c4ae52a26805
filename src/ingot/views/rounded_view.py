"""A view whose matrices are rounded by calibrated quantizers, each when its bytes are first read."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np

from ingot.codecs.table import CODECS
from ingot.core.numeric.dtypes import FLOATS, cast
from ingot.core.runtime.parallel import default_workers
from ingot.engine.chunks import largest_magnitude
from ingot.model.bytesource import DerivedSource
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.affine import ZEROS
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.scaled_codebook import SECOND
from ingot.model.part import Part
from ingot.model.reading.view import derive_checkpoint
from ingot.model.tensor import Array, Tensor
from ingot.naming.names import role_of
from ingot.quantization.choice import QuantizerSpec
from ingot.quantization.grid import Grid
from ingot.quantization.products import multiply
from ingot.quantization.scales import second_of
from ingot.quantization.tensor import Outcome, StatisticsSource, matrices, round_tensor, rounding_memory
from ingot.views.coded_step import CodedSteps, read_matrices
from ingot.views.common import BuildTensor, lazy_tensors, require_names
from ingot.views.input_scales import input_scales, members_of_merged

LoadStatistics = Callable[[], StatisticsSource]
ReadPart = Callable[[], Array]


@dataclass(frozen=True, slots=True)
class Rounding:
    """The matrices to round, their statistics, and the results, which are added when matrices are read.

    Parameters
    ----------
    choices : mapping of name to QuantizerSpec
    load_statistics : callable
        Returns the statistics; called when the first matrix is read.
    statistics_id : str
        The identity of the statistics.
    close : callable, optional
        Releases the statistics; called when the view is closed.
    dtypes : mapping of name to str
        The logical element type of a rounded matrix, if it differs from the stored one.
    extra_notes : callable, optional
        Returns notes on changes to the matrices before rounding.
    outcomes : dict
        Result per matrix (``NAME:expert.N`` for experts of a stack), set when the matrix is rounded.
    bias_changes : dict
        Largest change of each bias, set when the bias is read. None if the bias is unchanged, because the statistics
        lack the means of inputs.
    statistics_ready : bool
        Whether the statistics exist already, so that estimates of memory may read them.
    input_scales : bool
        Whether the view has an input scale for each matrix with a second scale (``views.input_scales``).
    replace_statistics : callable, optional
        Replaces the statistics that ``load_statistics`` returns, so that matrices can be rounded layer by layer. None
        if they cannot: the statistics exist already, or scales or steps are chosen for several matrices together.
    device : torch.device, optional
        The device on which matrices are rounded; None for the CPU.
    threads : int, optional
        The number of threads that matrices share; None for one per processor.
    saved : dict
        Tensors that an earlier run rounded: for each name and role, a function that reads the part.
    """

    choices: Mapping[str, QuantizerSpec]
    load_statistics: LoadStatistics
    statistics_id: str
    close: Callable[[], None] | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    extra_notes: Callable[[], Sequence[str]] | None = None
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    bias_changes: dict[str, float | None] = field(default_factory=dict)
    statistics_ready: bool = True
    input_scales: bool = False
    replace_statistics: Callable[[StatisticsSource], None] | None = None
    device: Any = None
    threads: int | None = None
    saved: dict[str, Mapping[str, ReadPart]] = field(default_factory=dict)


def round_to(checkpoint: Checkpoint, rounding: Rounding) -> Checkpoint:
    """Return the checkpoint with some matrices rounded; the view cannot be pickled."""
    require_names(checkpoint, rounding.choices)
    choices = rounding.choices
    cache = _RoundedCache(default_workers() + 2)
    shared = _Shared(_Magnitudes(checkpoint, choices), CodedSteps(checkpoint, choices))
    biases = {bias: name for name, spec in choices.items() if (bias := _bias_of(checkpoint, name, spec))}

    def work(name: str) -> _RoundedTensor:
        return _RoundedTensor(checkpoint[name], rounding, cache, shared)

    def builder(name: str) -> BuildTensor | None:
        if name in biases:
            return lambda: _corrected_bias(checkpoint[name], work(biases[name]), rounding)
        return (lambda: _tensor(work(name))) if name in choices else None

    entries = [(name, builder(name), name) for name in checkpoint]
    origins: dict[str, Sequence[str]] = {}
    if rounding.input_scales:
        matrices_with_inputs = [name for name, spec in choices.items() if spec.grid.second]
        scales = input_scales(checkpoint, matrices_with_inputs, rounding.load_statistics)
        origins = {scale: (name,) for scale, (name, _) in scales.items()}
        entries = [entry for entry in entries if entry[0] not in scales]
        entries += [(scale, build, name) for scale, (name, build) in scales.items()]
    text = {name: repr(spec) for name, spec in choices.items()}
    description = [rounding.statistics_id, text, *([] if rounding.device is None else [rounding.device.type])]
    return derive_checkpoint(
        checkpoint,
        lazy_tensors(entries, checkpoint),
        round_to,
        rounding,
        description,
        origins=origins,
        also_close=rounding.close,
    )


class _Magnitudes:
    """The largest magnitudes of matrices that have a second scale.

    Matrices that a program merges share the largest magnitude. Each matrix is read once.
    """

    def __init__(self, checkpoint: Checkpoint, choices: Mapping[str, QuantizerSpec]) -> None:
        self._checkpoint = checkpoint
        self._lock = threading.Lock()
        self._amax: dict[str, float] = {}
        self._members = members_of_merged(name for name, spec in choices.items() if spec.grid.second)

    def of_matrix(self, name: str) -> float:
        members = self._members[name]
        with self._lock:
            for member in members:
                if member not in self._amax:
                    self._amax[member] = largest_magnitude(self._checkpoint[member])
            return max(self._amax[member] for member in members)


@dataclass(frozen=True, slots=True)
class _Shared:
    """Values that depend on several matrices: largest magnitudes and steps."""

    magnitudes: _Magnitudes
    steps: CodedSteps


class _RoundedCache:
    """A cache of recently rounded matrices, because a reader of one part usually reads the others next."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _CachedParts] = OrderedDict()

    def entry(self, name: str) -> _CachedParts:
        with self._lock:
            item = self._entries.setdefault(name, _CachedParts())
            self._entries.move_to_end(name)
            while len(self._entries) > self.limit:
                self._entries.popitem(last=False)
            return item


class _CachedParts:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.parts: Mapping[str, memoryview] | None = None


class _RoundedTensor:
    """A tensor to round; its parts are computed when one of them is first read."""

    def __init__(self, tensor: Tensor, rounding: Rounding, cache: _RoundedCache, shared: _Shared) -> None:
        self.tensor = tensor
        self._cache = cache
        self._shared = shared
        self.spec = rounding.choices[tensor.name]
        self._load_statistics = rounding.load_statistics
        self._outcomes = rounding.outcomes
        self._statistics_ready = rounding.statistics_ready
        self._saved = rounding.saved
        self._device = rounding.device
        self._threads = rounding.threads
        self.layout = self.spec.layout(tensor.shape, rounding.dtypes.get(tensor.name, tensor.dtype))

    def part(self, role: str) -> memoryview:
        if role == SECOND:  # plans compare second scales, which depend on the weights alone
            return _bytes(np.full(1, second_of(np.zeros(0, np.float32), self._grid()), np.float32))
        item = self._cache.entry(self.tensor.name)
        with item.lock:
            if item.parts is None:
                item.parts = self._round()
            return item.parts[role]

    @property
    def memory(self) -> int:
        """The number of bytes of memory that rounding needs, including matrices in the cache."""
        shape = self.tensor.shape
        if self.tensor.name in self._saved:
            return sum(int(spec.length or 0) for spec in self.layout.part_specs(shape))
        first = next(name for name, _ in matrices(self.tensor.name, shape))
        statistics = self._load_statistics().for_matrix(first) if self._statistics_ready else None
        cached = self._cache.limit * sum(int(spec.length or 0) for spec in self.layout.part_specs(shape))
        vocabulary = is_vocabulary(self.tensor.name)
        return rounding_memory(self.spec, shape, statistics, vocabulary=vocabulary) + self.tensor.nbytes + cached

    def _round(self) -> Mapping[str, memoryview]:
        """Return the parts of the rounded tensor, by role. Each matrix is rounded by its statistics.

        All matrices of a stack use the table of the first matrix. If an earlier run rounded the tensor, its parts are
        read instead.
        """
        saved = self._saved.get(self.tensor.name)
        if saved is not None:
            return {role: _bytes(read()) for role, read in saved.items()}
        spec = replace(self.spec, grid=self._grid())
        parts, outcomes = round_tensor(
            spec, read_matrices(self.tensor), self._load_statistics(), None, self._device, self._threads
        )
        self._outcomes.update({outcome.matrix: outcome for outcome in outcomes})
        return {role: _bytes(array) for role, array in parts.items()}

    def _grid(self) -> Grid:
        """Return the grid to which the tensor is rounded, with the step or the largest magnitude that tensors share."""
        grid = self.spec.grid
        if grid.coded is not None:
            return replace(grid, step=self._shared.steps.of_bits(grid.coded, self._load_statistics()))
        return replace(grid, amax=self._shared.magnitudes.of_matrix(self.tensor.name)) if grid.second else grid


def is_vocabulary(name: str) -> bool:
    """Return whether a tensor is an embedding or a head. Their statistics lack G, the moments of the gradients."""
    return role_of(name) in ("embedding", "head")


def _bias_of(checkpoint: Checkpoint, name: str, spec: QuantizerSpec) -> str | None:
    """Return the name of a matrix's bias if it should be corrected and is a dense float vector, else None."""
    bias = f"{name.removesuffix('weight')}bias"
    if not spec.correct_bias or not name.endswith(".weight") or bias not in checkpoint:
        return None
    tensor = checkpoint[bias]
    is_float = tensor.codec == DenseLayout.codec and tensor.dtype in FLOATS
    return bias if is_float and tensor.shape == checkpoint[name].shape[:1] else None


def _corrected_bias(tensor: Tensor, work: _RoundedTensor, rounding: Rounding) -> Tensor:
    """Return a bias with the values ``b + (W - Q) m``, computed on access.

    b is the bias ``tensor``, W the matrix of ``work``, Q the rounded matrix, and m the means of the matrix's inputs.
    """
    part = Part(
        tensor.dtype,
        tensor.nbytes,
        _PartSource(_CorrectedBias(tensor, work, rounding), "data", tensor.nbytes),
        where=tensor.name,
    )
    return replace(tensor, parts={"data": part}, source_bits=tensor.stored_bits)


class _CorrectedBias:
    """The values of a corrected bias, computed on access; the interface is that of ``_RoundedTensor``."""

    def __init__(self, tensor: Tensor, work: _RoundedTensor, rounding: Rounding) -> None:
        self.tensor = tensor
        self._work = work
        self._rounding = rounding

    @property
    def memory(self) -> int:
        """The number of bytes of memory for rounding the matrix and for its difference to the original matrix."""
        return self._work.memory + 8 * self._work.tensor.size

    def part(self, role: str) -> memoryview:
        matrix = self._work.tensor
        values = cast(self.tensor.numpy(), "f32")
        statistics = self._rounding.load_statistics().for_matrix(matrix.name)
        means = None if statistics is None else statistics.means
        if means is None:
            self._rounding.bias_changes[self.tensor.name] = None
            return _bytes(self.tensor.numpy())
        error = cast(matrix.numpy(), "f32") - _tensor(self._work).numpy("f32")
        correction = multiply(error, means[:, None])[:, 0]
        self._rounding.bias_changes[self.tensor.name] = float(np.abs(correction).max(initial=0))
        return _bytes(cast(values + correction, self.tensor.dtype))


def _bytes(array: Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _tensor(work: _RoundedTensor) -> Tensor:
    tensor = work.tensor
    layout = work.layout
    parts = {
        spec.role: Part(
            spec.dtype,
            int(spec.length or 0),
            _PartSource(work, spec.role, int(spec.length or 0), work.spec.points if spec.role == ZEROS else None),
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


class _PartSource(DerivedSource):
    """A ``ByteSource`` for one part of a rounded tensor, or for a corrected bias."""

    mapped = False

    def __init__(
        self, work: _RoundedTensor | _CorrectedBias, role: str, size: int, integers: tuple[int, int] | None = None
    ) -> None:
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
        """Return the number of bytes of memory that rounding needs."""
        return self._work.memory

    def memory_hint(self) -> str:
        return "calibrate with --largest, which leaves out the largest second moments"

    def changed(self) -> bool:
        return any(part.source.changed() for part in self._work.tensor.parts.values())

    def close(self) -> None:
        """Do nothing: the checkpoint owns the sources."""

    def __reduce__(self) -> NoReturn:
        raise TypeError("a rounded view cannot be pickled: its matrices are computed in this process")
