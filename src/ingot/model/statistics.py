"""Statistics of a calibration: second moments of matrix inputs and gradients, by which quantizers weight errors.

A statistics file is safetensors (``spec/calibration.md``). For the matrix ``NAME`` of ``rows`` x ``cols``::

    NAME:inputs   f32 [cols, cols]  A, the second moment of the inputs; tokens have Fisher weights if gradients exist
    NAME:outputs  f32 [rows, rows]  G, the second moment of the gradients at the outputs; optional
    NAME:in_sum2  f32 [cols]        mean squares of the inputs, equal weights for all tokens
    NAME:absmax   f32 [cols]        the largest magnitude of each input
    NAME:means    f32 [cols]        means of the inputs, equal weights for all tokens; missing in older files
    NAME:count    i64 [1]           number of tokens

An expert of a stacked tensor is ``NAME:expert.N``. If several matrices share A, the metadata entry ``NAME:same`` is the
name of the matrix that stores it. Memory holds one array at a time.
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
"""The metadata key for the tokens at the beginning of each window."""
CHAT_WINDOWS = "chat_windows"
"""The metadata key for the number of windows that begin with a user's turn of the chat template."""
FIELDS = (INPUTS, OUTPUTS, SQUARES, ABSMAX, MEANS, COUNT)
SAME = "same"
_ROWS = 1024  # rows that are checked at a time

# a name only, because the function is in a package that imports this one
_READERS: Registry[Callable[..., Statistics]] = Registry(
    "statistics", (("file", "ingot.conversion.statistics_files:open_statistics"),)
)


class ArraySource(Protocol):
    """An array that is read when ``numpy`` is called."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def numpy(self) -> Array: ...


@dataclass(frozen=True, slots=True)
class ArrayEntry:
    """An array in memory as an ``ArraySource``."""

    array: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    def numpy(self) -> Array:
        return self.array


class MatrixStatistics:
    """The statistics of one matrix. Each array is read and checked on access and not cached.

    ``count`` is the number of tokens; 0 for an expert that received none.
    """

    def __init__(self, name: str, entries: Mapping[str, ArraySource], count: int) -> None:
        self.name = name
        self.count = count
        self._entries = entries

    @property
    def rows(self) -> int | None:
        """The number of rows of the matrix; None if there are no statistics of gradients."""
        return self._entries[OUTPUTS].shape[0] if OUTPUTS in self._entries else None

    @property
    def cols(self) -> int:
        """The number of columns of the matrix."""
        return self._entries[SQUARES].shape[0]

    @property
    def inputs(self) -> Array | None:
        """A: f32 [cols, cols], symmetric; None if only its diagonal is stored."""
        return self._array(INPUTS)

    @property
    def outputs(self) -> Array | None:
        """G: f32 [rows, rows], symmetric; None if there are no statistics of gradients."""
        return self._array(OUTPUTS)

    @property
    def diagonal(self) -> Array:
        """Mean squares of the inputs: f32 [cols]."""
        squares = self._array(SQUARES)
        assert squares is not None  # _check_matrix requires it
        if (squares < 0).any():
            raise self._refusal("statistics.value", f"expected mean squares in {SQUARES}, found a negative number")
        return squares

    @property
    def absmax(self) -> Array | None:
        """The largest magnitude of each input: f32 [cols]; None if it is not stored."""
        return self._array(ABSMAX)

    @property
    def means(self) -> Array | None:
        """Means of the inputs: f32 [cols]; None if they are not stored."""
        return self._array(MEANS)

    @property
    def has_inputs(self) -> bool:
        """Whether the full matrix A is stored."""
        return INPUTS in self._entries

    def require_shape(self, rows: int, cols: int) -> None:
        """Raise ``FormatError`` ``statistics.shape`` unless the statistics fit a matrix of ``rows`` x ``cols``."""
        if self.cols != cols or self.rows not in (None, rows):
            size = f"{'any' if self.rows is None else self.rows} x {self.cols}"
            raise self._refusal("statistics.shape", f"expected statistics of {rows} x {cols}, found those of {size}")

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
        Texts: ``ingot.statistics`` is the version, ``model`` the content id of the model; others describe the
        calibration.
    location : str
        The location for error messages.
    on_close : callable
        Releases the file.

    Raises
    ------
    FormatError
        ``statistics.version``. ``statistics.entries``: a name without a valid field, or a missing field.
        ``statistics.shape``: sizes that do not match. ``statistics.value``.
    """

    def __init__(
        self,
        entries: Mapping[str, ArraySource],
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
        self._groups = {
            name: _check_matrix(name, group, location) for name, group in _group_by_matrix(entries, location).items()
        }
        self._share(location)

    @staticmethod
    def open(path: AnyPath, model: Any = None) -> Statistics:
        """Open a statistics file, or an importance matrix of llama.cpp (GGUF or the older binary format).

        Parameters
        ----------
        path : path or address
        model : Checkpoint, optional
            The calibrated model. Its tensor names replace llama.cpp's names. Statistics of another model are refused.

        Raises
        ------
        FormatError
            ``statistics.*``, and the rules of the file's format.
        UsageError
            ``statistics.model``: the statistics belong to another model or to none of the model's matrices.
        """
        return _READERS["file"](path, model)

    @classmethod
    def in_memory(cls, arrays: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> Statistics:
        """Return statistics from arrays, keyed by ``NAME:FIELD``. Raises the errors of ``Statistics``."""
        return cls(
            {key: ArrayEntry(array) for key, array in arrays.items()}, {VERSION_KEY: VERSION, **(metadata or {})}
        )

    @property
    def names(self) -> Sequence[str]:
        """The names of the matrices with statistics, in code-point order; experts as ``NAME:expert.N``."""
        return sorted(self._groups)

    @property
    def model_id(self) -> str | None:
        """The content id of the calibrated model; None if the file does not state it."""
        return self.metadata.get(MODEL_KEY)

    def for_matrix(self, name: str) -> MatrixStatistics | None:
        """Return the statistics of a matrix; None if there are none."""
        group = self._groups.get(name)
        return None if group is None else MatrixStatistics(name, group[0], group[1])

    def require_model(self, content_id: str) -> None:
        """Raise ``UsageError`` ``statistics.model`` if the statistics belong to another model."""
        if self.model_id is not None and self.model_id != content_id:
            raise UsageError(
                f"expected statistics of the model {content_id}, found those of {self.model_id}: calibrate this model",
                rule="statistics.model",
                where=self.location,
            )

    def with_names(self, names: Mapping[str, str]) -> Statistics:
        """Return the statistics of the matrices in ``names`` (old name to new name), under the new names."""
        entries = {
            f"{new}:{field}": entry
            for old, new in names.items()
            if old in self._groups
            for field, entry in self._entries_of(old).items()
        }
        return Statistics(entries, _without_shared(self.metadata), self.location, self._on_close)

    def close(self) -> None:
        """Release the file; a second call does nothing."""
        on_close = self._on_close
        self._on_close = None
        if on_close is not None:
            on_close()

    def __enter__(self) -> Statistics:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _entries_of(self, name: str) -> Mapping[str, ArraySource]:
        entries, count = self._groups[name]
        return {**entries, COUNT: ArrayEntry(np.array([count], np.int64))}

    def _share(self, location: str) -> None:
        """Add A to each matrix that shares it with another matrix, which the metadata entry ``NAME:same`` names.

        Raises ``FormatError`` ``statistics.entries`` if the other matrix has no A, or if the matrix has its own.
        """
        for key, source_name in self.metadata.items():
            name, _, field = key.rpartition(":")
            if field != SAME:
                continue
            source = self._groups.get(source_name, ({}, 0))[0].get(INPUTS)
            if name not in self._groups or source is None or INPUTS in self._groups[name][0]:
                raise FormatError(
                    "statistics.entries", f"expected A of {name!r:.80} in {source_name!r:.80}", where=location
                )
            entries, count = self._groups[name]
            self._groups[name] = _check_matrix(
                name, {**entries, INPUTS: source, COUNT: ArrayEntry(np.array([count]))}, location
            )


def _without_shared(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata without the entries about shared matrices A."""
    return {key: value for key, value in metadata.items() if not key.endswith(f":{SAME}")}


def _group_by_matrix(entries: Mapping[str, ArraySource], location: str) -> dict[str, dict[str, ArraySource]]:
    groups: dict[str, dict[str, ArraySource]] = {}
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


def _check_matrix(name: str, group: Mapping[str, ArraySource], location: str) -> tuple[dict[str, ArraySource], int]:
    """Check the entries of a matrix. Return the entries except the count, and the count."""
    matrix_location = f"{location}: {name}"
    if SQUARES not in group or COUNT not in group:
        raise FormatError("statistics.entries", f"expected {SQUARES} and {COUNT}", where=matrix_location)
    cols = group[SQUARES].shape
    rows = group[OUTPUTS].shape[:1] if OUTPUTS in group else ()
    shapes = {INPUTS: cols * 2, OUTPUTS: rows * 2, SQUARES: cols[:1], ABSMAX: cols, MEANS: cols, COUNT: (1,)}
    for field, entry in group.items():
        if tuple(entry.shape) != shapes[field] or not shapes[field]:
            raise FormatError(
                "statistics.shape",
                f"expected {field} of shape {list(shapes[field])}, found {list(entry.shape)}",
                where=matrix_location,
            )
    count = group[COUNT].numpy()
    if count.dtype.kind not in "iu" or not 0 <= int(count[0]) < 1 << 62:
        raise FormatError("statistics.value", f"expected a number of tokens in {COUNT}", where=matrix_location)
    return {field: entry for field, entry in group.items() if field != COUNT}, int(count[0])
