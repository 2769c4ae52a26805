"""Messages between a driver and its workers: JSON objects, one on a line, which both sides check.

Nothing is pickled: a message names a task type of the table ``tasks.TASK_TYPES``, and its fields have a schema. The
standard module ``json`` encodes and decodes the text, because it supports infinite numbers and names that are not
UTF-8.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from ingot import errors
from ingot.core.numeric.stats import ErrorStats
from ingot.core.parsing.strictjson import preload
from ingot.errors import IngotError, MissingExtraError

T = TypeVar("T")

LARGEST = 1 << 28
"""The length in bytes of the longest line that either side reads."""

_LONGEST_TEXT = 1 << 16
_ERRORS = {
    cls.__name__: cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, IngotError) and cls is not IngotError
}

Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
"""A BLAKE3 digest in hexadecimal digits."""

Token = Annotated[str, Meta(pattern=r"^[0-9a-f]{8}\Z")]
"""A token that distinguishes the attempts of one task."""

_Crc = Annotated[str, Meta(pattern=r"^(crc32c:0x[0-9A-Fa-f]{8})?\Z")]
_Count = Annotated[int, Meta(ge=0)]
_Seconds = Annotated[float, Meta(ge=0)]


class InvalidMessageError(ValueError):
    """A line that is not a message, or a message that breaks its schema."""


class WorkerLostError(Exception):
    """A worker ended before it answered, stopped responding, or returned an invalid answer.

    Another worker may run the task.
    """


@preload
class Task(Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a plan: the steps ``start`` (inclusive) to ``stop`` (exclusive), which read ``nbytes`` bytes.

    If ``rows`` is set, the task is a range of rows of a single step: first row (inclusive) and last row (exclusive). If
    ``files`` is not empty, the steps are all steps of these files of the result, and the worker writes the full files.
    """

    start: _Count
    stop: _Count
    nbytes: _Count
    rows: tuple[_Count, _Count] | None = None
    files: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The common prefix of the names of the task's files."""
        rows = "" if self.rows is None else f"-{self.rows[0]}-{self.rows[1]}"
        return f"{self.start:06}-{self.stop:06}{rows}"


@preload
class StepResult(Struct, frozen=True, forbid_unknown_fields=True):
    """The result of a step, or of a range of its rows.

    The stored bytes are either in ``file`` from ``offset`` on, or at their final offsets in the artifact. In ``file``
    they consist of ``runs``, each with the role of a part and a number of bytes. ``crc`` is the CRC-32C over all runs.
    For bytes at final offsets, ``written`` is the record of the format's writer. ``params`` are the parameters of fit
    passes (``engine.data.to_json_value``). ``notes`` is the result of ``StepRun.notes``.
    """

    number: _Count
    error: ErrorStats
    notes: dict[str, Any]
    params: dict[str, Any] | None = None
    file: str = ""
    offset: _Count = 0
    runs: list[tuple[str, _Count]] = []
    crc: _Crc = ""
    written: dict[str, Any] | None = None

    @property
    def nbytes(self) -> int:
        """The number of bytes of the step in ``file``."""
        return sum(count for _, count in self.runs)


@preload
class TaskResult(Struct, frozen=True, forbid_unknown_fields=True):
    """A finished task: the worker's name, the seconds that it took, and a result for each step.

    ``attempt`` is the token of the attempt. ``files`` are the files that the worker wrote to the shared folder.
    ``states`` describe each file: its size, and its version if the store has versions.
    """

    task: Task
    attempt: Token
    worker: str
    seconds: _Seconds
    steps: list[StepResult]
    files: list[str] = []
    states: list[str] = []


@preload
class ErrorData(Struct, frozen=True, forbid_unknown_fields=True):
    """An error of a worker as data: the name of its class and the fields of its text."""

    type: str
    message: str
    rule: str | None = None
    location: str | None = None
    extra: str | None = None
    errno: int | None = None


@preload
class Request(Struct, frozen=True, forbid_unknown_fields=True):
    """A task for a worker: its id, the driver's version of Ingot, the task type, and the fields of that type."""

    id: int
    ingot: str
    type: str
    body: dict[str, Any]


@preload
class Answer(Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to a request: a result or an error. ``id`` is None if the request has no readable id."""

    id: int | None
    result: Any = None
    error: ErrorData | None = None


@preload
class Beat(Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's heartbeat with the seconds of processor time that its tasks have used so far."""

    beat: _Seconds


BEAT = b'{"beat"'
"""The first bytes of the line of a heartbeat."""


def encode(message: Any) -> bytes:
    """Return a message as a line without a newline.

    Raises ``TypeError``, ``ValueError`` or ``RecursionError`` for a message that JSON cannot express or that is longer
    than ``LARGEST``.
    """
    line = json.dumps(msgspec.to_builtins(message)).encode()
    if len(line) > LARGEST:
        raise ValueError(f"a message of {len(line)} bytes exceeds the limit of {LARGEST}")
    return line


def decode(line: bytes, cls: type[T]) -> T:
    """Return the message in a line; raise ``InvalidMessageError`` if the line contains no message of type ``cls``."""
    if len(line) > LARGEST:
        raise InvalidMessageError(f"expected a message of at most {LARGEST} bytes")
    try:
        return convert(json.loads(line), cls)
    except InvalidMessageError:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidMessageError(f"expected a JSON object on a line: {str(error)[:200]}") from error


def convert(value: Any, cls: type[T]) -> T:
    """Return parsed JSON as a value of type ``cls``; raise ``InvalidMessageError`` if it breaks the type's schema."""
    try:
        return msgspec.convert(value, cls)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise InvalidMessageError(str(error)[:200]) from error


def encode_error(error: BaseException, worker: str) -> ErrorData:
    """Return an error as data.

    The fields of an ``IngotError`` or ``OSError`` are preserved. An error of another class is reduced to a text.
    """
    if isinstance(error, IngotError):
        name = next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in {*_ERRORS, "IngotError"})
        extra = _text(error.extra) if isinstance(error, MissingExtraError) else None
        rule, location = (None if item is None else _text(item) for item in (error.rule, error.where))
        return ErrorData(name, _text(error.message), rule, location, extra)
    if isinstance(error, MemoryError):
        message = f"worker {worker} ran out of memory: give each worker more, or a lower max_ram"
        return ErrorData("ResourceError", message, "ram.exhausted")
    if isinstance(error, OSError) and isinstance(error.errno, int):
        location = None if error.filename is None else _text(error.filename)
        return ErrorData("OSError", _text(error.strerror), location=location, errno=error.errno)
    return ErrorData("", f"worker {worker} ended its task with {type(error).__name__}: {_text(error)}"[:_LONGEST_TEXT])


def decode_error(data: ErrorData) -> Exception:
    """Return the error that ``encode_error`` encoded; an error that was reduced to a text is a ``RuntimeError``."""
    if data.type == "OSError":
        return OSError(data.errno, data.message, data.location)
    cls = _ERRORS.get(data.type, IngotError if data.type == "IngotError" else None)
    if cls is None:
        return RuntimeError(data.message)
    error = cls.__new__(cls, data.message)  # the constructors of the classes differ
    IngotError.__init__(error, data.message, rule=data.rule, where=data.location)
    if isinstance(error, MissingExtraError):
        error.extra = data.extra or ""
    return error


def _text(value: object) -> str:
    """Return ``str(value)``, shortened, or a placeholder if ``str`` raises an error."""
    try:
        return str(value)[:_LONGEST_TEXT]
    except Exception as error:
        return f"(no text: {type(error).__name__})"
