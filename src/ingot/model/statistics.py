"""What a model's matrices multiply: second moments that quantizers weigh errors by, one matrix in memory at a time.

A statistics file is safetensors (``spec/calibration.md``). For the matrix ``NAME`` of ``rows`` x ``cols``::

    NAME:inputs   f32 [cols, cols]  A, the second moment of its inputs, tokens weighted by the Fisher where it was taken
    NAME:outputs  f32 [rows, rows]  G, the second moment of the gradients at its outputs, only where they were taken
    NAME:in_sum2  f32 [cols]        mean squares of its inputs, all tokens alike
    NAME:absmax   f32 [cols]        the largest magnitude of each input
    NAME:means    f32 [cols]        means of its inputs, all tokens alike; files of before have none
    NAME:count    i64 [1]           tokens seen

An expert of a stacked tensor is ``NAME:expert.N``. Where several matrices have one A, the metadata say
``NAME:same`` = the name that it is stored under.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ingot.core.registry import Registry
from ingot.errors import FormatError, UsageError
from ingot.model.tensor import Array

if TYPE_CHECKING:
    from ingot.stores.location import AnyPath

VERSION = "1"
VERSION_KEY = "ingot.statistics"
MODEL_KEY = "model"
INPUTS = "inputs"
OUTPUTS = "outputs"
SQUARES = "in_sum2"
ABSMAX = "absmax"
MEANS = "means"
COUNT = "count"
WINDOW_PREFIX = "window_prefix"
"""The key of the metadata for the tokens that each window began with."""
FIELDS = (INPUTS, OUTPUTS, SQUARES, ABSMAX, MEANS, COUNT)
SAME = "same"
_ROWS = 1024  # that are looked at together

# Who opens files lies above this room, as it does for tensors' decoders.
_READERS: Registry[Callable[..., Statistics]] = Registry(
    "statistics", (("file", "ingot.conversion.statistics_files:open_statistics"),)
)


class Entry(Protocol):
    """One array of a file, read when it is asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def numpy(self) -> Array: ...


@dataclass(frozen=True, slots=True)
class Held:
    """An array in memory as an ``Entry``."""

    array: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    def numpy(self) -> Array:
        return self.array


class MatrixStatistics:
    """What is known of one matrix; each array is read when it is asked for, checked, and not kept.

    ``count`` is the number of tokens seen, 0 for an expert that none was sent to.
    """

    def __init__(self, name: str, entries: Mapping[str, Entry], count: int) -> None:
        self.name = name
        self.count = count
        self._entries = entries

    @property
    def rows(self) -> int | None:
        """Rows of the matrix, where gradients were taken."""
        return self._entries[OUTPUTS].shape[0] if OUTPUTS in self._entries else None

    @property
    def cols(self) -> int:
        """Columns of the matrix."""
        return self._entries[SQUARES].shape[0]

    @property
    def inputs(self) -> Array | None:
        """A: f32 [cols, cols], symmetric; None where only the diagonal was taken."""
        return self._array(INPUTS)

    @property
    def outputs(self) -> Array | None:
        """G: f32 [rows, rows], symmetric; None where no gradients were taken."""
        return self._array(OUTPUTS)

    @property
    def diagonal(self) -> Array:
        """Mean squares of the inputs: f32 [cols]."""
        found = self._array(SQUARES)
        assert found is not None  # _grouped sees to it
        if (found < 0).any():
            raise self._refusal("statistics.value", f"expected mean squares in {SQUARES}, found a negative number")
        return found

    @property
    def absmax(self) -> Array | None:
        """The largest magnitude of each input: f32 [cols]; None where it is not known."""
        return self._array(ABSMAX)

    @property
    def means(self) -> Array | None:
        """Means of the inputs: f32 [cols]; None where they were not taken."""
        return self._array(MEANS)

    @property
    def has_inputs(self) -> bool:
        """Whether A is there, not its diagonal alone."""
        return INPUTS in self._entries

    @property
    def has_factors(self) -> bool:
        """Whether both A and G are there."""
        return INPUTS in self._entries and OUTPUTS in self._entries

    def require_shape(self, rows: int, cols: int) -> None:
        """Refuse a matrix that these are not the statistics of; ``statistics.shape``."""
        if self.cols != cols or self.rows not in (None, rows):
            of = f"{'any' if self.rows is None else self.rows} x {self.cols}"
            raise self._refusal("statistics.shape", f"expected statistics of {rows} x {cols}, found those of {of}")

    def _array(self, field: str) -> Array | None:
        entry = self._entries.get(field)
        if entry is None:
            return None
        array = np.asarray(entry.numpy(), np.float32)
        if not all(np.isfinite(array[first : first + _ROWS]).all() for first in range(0, len(array), _ROWS)):
            raise self._refusal("statistics.value", f"expected finite numbers in {field}, found NaN or infinity")
        return array

    def _refusal(self, rule: str, message: str) -> FormatError:
        return FormatError(rule, f"{message}; calibrate again", where=self.name)


class Statistics:
    """The statistics of a model's matrices by the names of their tensors; a context manager.

    Parameters
    ----------
    entries : mapping
        Arrays by ``NAME:FIELD``.
    metadata : mapping
        Text: ``ingot.statistics`` the version, ``model`` the content id of the model, and how they were taken.
    location : str
        For messages.
    on_close : callable
        Releases the file.

    Raises
    ------
    FormatError
        ``statistics.version``; ``statistics.entries``: a name without a known field, or a matrix without all that is
        needed; ``statistics.shape``: sizes that do not fit each other; ``statistics.value``.
    """

    def __init__(
        self,
        entries: Mapping[str, Entry],
        metadata: Mapping[str, str],
        location: str = "statistics",
        on_close: Callable[[], None] | None = None,
    ) -> None:
        if metadata.get(VERSION_KEY) != VERSION:
            raise FormatError(
                "statistics.version",
                f"expected statistics of version {VERSION}, found {metadata.get(VERSION_KEY)!r:.40}",
                where=location,
            )
        self.metadata = dict(metadata)
        self.location = location
        self._on_close = on_close
        self._groups = {name: _checked(name, group, location) for name, group in _grouped(entries, location).items()}
        self._share(location)

    @staticmethod
    def open(path: AnyPath, model: Any = None) -> Statistics:
        """Open a statistics file, or an importance matrix of llama.cpp (GGUF or the older binary form).

        Parameters
        ----------
        path : path or address
        model : Checkpoint, optional
            The model that is meant: its names take the place of llama.cpp's, and a file of another model is refused.

        Raises
        ------
        FormatError
            ``statistics.*``, and the rules of the file's format.
        UsageError
            ``statistics.model``: they were taken of another model, or of none of its matrices.
        """
        return _READERS["file"](path, model)

    @classmethod
    def in_memory(cls, arrays: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> Statistics:
        """Return statistics of arrays by ``NAME:FIELD``; errors as of a file."""
        return cls({key: Held(array) for key, array in arrays.items()}, {VERSION_KEY: VERSION, **(metadata or {})})

    @property
    def names(self) -> Sequence[str]:
        """The matrices that there are statistics of, in code-point order; experts as ``NAME:expert.N``."""
        return sorted(self._groups)

    @property
    def model_id(self) -> str | None:
        """The content id of the model that they were taken of; None where the file does not say."""
        return self.metadata.get(MODEL_KEY)

    def for_matrix(self, name: str) -> MatrixStatistics | None:
        """Return what is known of a matrix, None where nothing is."""
        group = self._groups.get(name)
        return None if group is None else MatrixStatistics(name, group[0], group[1])

    def require_model(self, content_id: str) -> None:
        """Refuse statistics of another model; ``UsageError`` ``statistics.model``."""
        if self.model_id is not None and self.model_id != content_id:
            raise UsageError(
                f"expected statistics of the model {content_id}, found those of {self.model_id}: calibrate this model",
                rule="statistics.model",
                where=self.location,
            )

    def renamed(self, names: Mapping[str, str]) -> Statistics:
        """Return the same statistics with the matrices of ``names`` alone, under the names that these give."""
        entries = {
            f"{new}:{field}": entry
            for old, new in names.items()
            if old in self._groups
            for field, entry in self._entries_of(old).items()
        }
        return Statistics(entries, _plain(self.metadata), self.location, self._on_close)

    def close(self) -> None:
        """Release the file; a second call does nothing."""
        done = self._on_close
        self._on_close = None
        if done is not None:
            done()

    def __enter__(self) -> Statistics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _entries_of(self, name: str) -> Mapping[str, Entry]:
        entries, count = self._groups[name]
        return {**entries, COUNT: Held(np.array([count], np.int64))}

    def _share(self, location: str) -> None:
        """Give the matrices that the metadata speak of another's A."""
        for key, other in self.metadata.items():
            name, _, field = key.rpartition(":")
            if field != SAME:
                continue
            source = self._groups.get(other, ({}, 0))[0].get(INPUTS)
            if name not in self._groups or source is None or INPUTS in self._groups[name][0]:
                raise FormatError("statistics.entries", f"expected A of {name!r:.80} in {other!r:.80}", where=location)
            entries, count = self._groups[name]
            self._groups[name] = _checked(name, {**entries, INPUTS: source, COUNT: Held(np.array([count]))}, location)


def _plain(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata without what they say of single matrices."""
    return {key: value for key, value in metadata.items() if not key.endswith(f":{SAME}")}


def _grouped(entries: Mapping[str, Entry], location: str) -> dict[str, dict[str, Entry]]:
    groups: dict[str, dict[str, Entry]] = {}
    for key in entries:
        name, _, field = key.rpartition(":")
        if not name or field not in FIELDS:
            raise FormatError(
                "statistics.entries",
                f"expected NAME:FIELD with one of {', '.join(FIELDS)}, found {key!r:.120}",
                where=location,
            )
        groups.setdefault(name, {})[field] = entries[key]
    return groups


def _checked(name: str, group: Mapping[str, Entry], location: str) -> tuple[dict[str, Entry], int]:
    """Return a matrix's entries but the count, and the count, once their sizes fit each other."""
    where = f"{location}: {name}"
    if SQUARES not in group or COUNT not in group:
        raise FormatError("statistics.entries", f"expected {SQUARES} and {COUNT}", where=where)
    cols = group[SQUARES].shape
    rows = group[OUTPUTS].shape[:1] if OUTPUTS in group else ()
    wanted = {INPUTS: cols * 2, OUTPUTS: rows * 2, SQUARES: cols[:1], ABSMAX: cols, MEANS: cols, COUNT: (1,)}
    for field, entry in group.items():
        if tuple(entry.shape) != wanted[field] or not wanted[field]:
            raise FormatError(
                "statistics.shape",
                f"expected {field} of shape {list(wanted[field])}, found {list(entry.shape)}",
                where=where,
            )
    count = group[COUNT].numpy()
    if count.dtype.kind not in "iu" or not 0 <= int(count[0]) < 1 << 62:
        raise FormatError("statistics.value", f"expected a number of tokens in {COUNT}", where=where)
    return {field: entry for field, entry in group.items() if field != COUNT}, int(count[0])
