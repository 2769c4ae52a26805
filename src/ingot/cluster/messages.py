"""Messages between a driver and its workers: JSON objects, one on a line, which both sides check.

Nothing is pickled: a message names a task type of a fixed table (``task_types``), and its fields have a schema. The
standard module ``json`` writes and reads the text because it keeps infinite numbers and names that are not UTF-8.
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
"""Bytes of the longest line that either side reads."""

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
    """A worker ended before it answered, or was given up: it stopped, or what it answered is wrong.

    Another worker may do the task.
    """


@preload
class Task(Struct, frozen=True, forbid_unknown_fields=True):
    """Consecutive steps of a plan, from ``start`` to before ``stop``, which read ``nbytes``.

    With ``rows`` the task is these rows of a single step, from the first to before the second. With ``files`` it is all
    steps of these files of the result, which the worker makes in full.
    """

    start: _Count
    stop: _Count
    nbytes: _Count
    rows: tuple[_Count, _Count] | None = None
    files: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The common beginning of the names of the task's files."""
        rows = "" if self.rows is None else f"-{self.rows[0]}-{self.rows[1]}"
        return f"{self.start:06}-{self.stop:06}{rows}"


@preload
class StepResult(Struct, frozen=True, forbid_unknown_fields=True):
    """The result of a step, or of some of its rows.

    The stored bytes lie in ``file`` from ``offset`` on, ``runs`` of a part's role and a number of bytes each, and
    ``crc`` is the CRC-32C over all of them. Or they lie in their final place, and ``written`` is the writer's record.
    ``params`` are parameters that were fitted to the values, as ``engine.data.plain`` returns them. ``notes`` are those
    of ``StepRun.notes``.
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
        """Bytes in the file."""
        return sum(count for _, count in self.runs)


@preload
class TaskResult(Struct, frozen=True, forbid_unknown_fields=True):
    """A finished task: the worker's name, seconds, and a result for each step.

    ``attempt`` is the token of the attempt. ``files`` are those that the worker left in the shared folder, and
    ``states`` the store's description of each: its size, and the name of a version where the store has versions.
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
    """An error on its way to the driver: the name of its class, and the fields of its text."""

    type: str
    message: str
    rule: str | None = None
    location: str | None = None
    extra: str | None = None
    errno: int | None = None


@preload
class Request(Struct, frozen=True, forbid_unknown_fields=True):
    """A task for a worker: its number, the driver's version of Ingot, the type, and the fields of that type."""

    id: int
    ingot: str
    type: str
    body: dict[str, Any]


@preload
class Answer(Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to a request: a result or an error. ``id`` is None if the request has no id that can be read."""

    id: int | None
    result: Any = None
    error: ErrorData | None = None


@preload
class Beat(Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's heartbeat: the seconds of processor time that its tasks have used so far."""

    beat: _Seconds


BEAT = b'{"beat"'
"""The first bytes of a heartbeat's line."""


def encode(message: Any) -> bytes:
    """Return a message as a line without its end; raises ``TypeError``, ``ValueError``, ``RecursionError``."""
    line = json.dumps(msgspec.to_builtins(message)).encode()
    if len(line) > LARGEST:
        raise ValueError(f"a message of {len(line)} bytes is longer than any is allowed to be, {LARGEST}")
    return line


def decode(line: bytes, cls: type[T]) -> T:
    """Return the message of a line; raises ``InvalidMessageError``."""
    if len(line) > LARGEST:
        raise InvalidMessageError(f"expected a message of at most {LARGEST} bytes")
    try:
        return convert(json.loads(line), cls)
    except InvalidMessageError:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidMessageError(f"expected a JSON object on a line: {str(error)[:200]}") from error


def convert(value: Any, cls: type[T]) -> T:
    """Return parsed JSON as a value of a type; raises ``InvalidMessageError``."""
    try:
        return msgspec.convert(value, cls)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise InvalidMessageError(str(error)[:200]) from error


def encode_error(error: BaseException, worker: str) -> ErrorData:
    """Return an error as data. What is no ``IngotError`` and no ``OSError`` is described in words."""
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
    """Return the error that ``encode_error`` was given; a ``RuntimeError`` for one without a class of Ingot's own."""
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
    """Return the text of a value; that of an error may itself raise."""
    try:
        return str(value)[:_LONGEST_TEXT]
    except Exception as error:
        return f"(no text: {type(error).__name__})"
