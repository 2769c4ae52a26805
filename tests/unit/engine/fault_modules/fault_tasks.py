"""Tasks that go wrong in every way that a worker can."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from msgspec import Struct

from ingot import errors
from ingot.cluster import messages
from ingot.cluster.tasks import TaskType


class Unpicklable(Exception):  # noqa: N818
    def __reduce__(self) -> Any:
        raise TypeError("not to be pickled")


class TwoArguments(Exception):  # noqa: N818
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class Textless(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise ValueError("no text")


class Derived(errors.IntegrityError):
    """A class of its own with the rule of its base."""


ERRORS: dict[str, Any] = {
    "unpicklable": lambda: Unpicklable("of the task"),
    "two arguments": lambda: TwoArguments("one", "two"),
    "textless": Textless,
    "group": lambda: ExceptionGroup("several", [ValueError("a"), KeyError("b")]),
    "exit": lambda: SystemExit(7),
    "interrupt": KeyboardInterrupt,
    "base": lambda: GeneratorExit("odd"),
    "surrogate": lambda: RuntimeError("\udcff\n\x1b[31m"),
    "memory": MemoryError,
    "os": lambda: OSError(28, "No space left on device", "/data/x"),
    "ingot": lambda: errors.FormatError("test.rule", "the message", where="there"),
    "derived": lambda: Derived("test.rule", "the message"),
    "extra": lambda: errors.MissingExtraError("pack", "more"),
}


class EchoBody(Struct):
    value: Any = None


class ErrorBody(Struct):
    name: str


class SecondsBody(Struct):
    seconds: float


class CountBody(Struct):
    count: int


class GarbleBody(Struct):
    """``flag``, a file: only the worker that makes it answers wrongly; None: all do."""

    line: str
    flag: str | None = None


def echo(body: EchoBody) -> dict[str, Any]:
    return {"value": body.value, "pid": os.getpid(), "path": sys.path, "numpy": np.__file__}


def fail(body: ErrorBody) -> None:
    error = ERRORS[body.name]()
    raise error


def end(body: CountBody) -> None:
    os._exit(body.count)


def sleep(body: SecondsBody) -> int:
    time.sleep(body.seconds)
    return os.getpid()


def hash_bytes(body: CountBody) -> str:
    """One call of native code that takes long."""
    return hashlib.pbkdf2_hmac("sha256", b"", b"", body.count).hex()


def garble(body: GarbleBody) -> int:
    try:
        if body.flag is not None:
            Path(body.flag).touch(exist_ok=False)
    except FileExistsError:
        return os.getpid()

    def dumps(message: Any) -> str:
        return body.line if "result" in message else json.dumps(message)

    messages.json = SimpleNamespace(dumps=dumps, loads=json.loads)
    return 0


ECHO = TaskType(EchoBody, dict[str, Any], echo)
RAISE = TaskType(ErrorBody, type(None), fail)
EXIT = TaskType(CountBody, type(None), end)
SLEEP = TaskType(SecondsBody, int, sleep)
HASH = TaskType(CountBody, str, hash_bytes)
GARBLE = TaskType(GarbleBody, int, garble)
