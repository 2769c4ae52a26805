"""Tasks for workers, and what workers note of what they made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ingot.core.stats import ErrorStats
from ingot.engine.data import plain, unplain


@dataclass(frozen=True, slots=True)
class Task:
    """Steps of a plan by their numbers, from ``start`` to before ``stop``, which read ``nbytes``.

    With ``rows`` these rows of a single step, from the first to before the second. With ``files`` all the steps of
    these files of the result, which are made as a whole.
    """

    start: int
    stop: int
    nbytes: int
    rows: tuple[int, int] | None = None
    files: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What files of this task begin with."""
        rows = "" if self.rows is None else f"-{self.rows[0]}-{self.rows[1]}"
        return f"{self.start:06}-{self.stop:06}{rows}"


@dataclass(frozen=True, slots=True)
class Made:
    """What a worker made of a step, or of some of its rows.

    The stored bytes are in ``file`` from ``offset`` on, ``runs`` of a part's role and a number of bytes each, with the
    CRC-32C ``crc`` over all of them. Or they are in their place already, as the writer's record ``written`` says.
    ``params`` are those of the spec where they were learnt, ``notes`` what the chunks told.
    """

    number: int
    error: ErrorStats
    notes: Mapping[str, Any]
    params: Mapping[str, Any] | None = None
    file: str = ""
    offset: int = 0
    runs: Sequence[tuple[str, int]] = ()
    crc: str = ""
    written: dict[str, Any] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return sum(count for _, count in self.runs)


@dataclass(frozen=True, slots=True)
class Note:
    """A finished task: by whom, in how many seconds, what was made.

    ``files`` are those that it left: of the task's, where it has some, in their order. ``states`` are what the store
    says of each: bytes, and a version's name where it has one.
    """

    task: Task
    worker: str
    seconds: float
    made: Sequence[Made]
    files: Sequence[str] = ()
    states: Sequence[str] = ()


def note_json(note: Note) -> bytes:
    """Return a note as JSON. The standard module: it keeps infinite errors."""
    made = [{**asdict(item), "params": plain(item.params)} for item in note.made]
    return json.dumps({**asdict(note), "made": made}).encode()


def note_of(data: bytes) -> Note:
    """Return what ``note_json`` was given; ``ValueError``, ``TypeError``, ``KeyError`` for anything else."""
    found = json.loads(data)
    task = found["task"]
    rows = None if task["rows"] is None else (int(task["rows"][0]), int(task["rows"][1]))
    return Note(
        Task(int(task["start"]), int(task["stop"]), int(task["nbytes"]), rows, tuple(map(str, task["files"]))),
        str(found["worker"]),
        float(found["seconds"]),
        [_made_of(item) for item in found["made"]],
        [str(name) for name in found["files"]],
        [str(state) for state in found["states"]],
    )


def _made_of(found: dict[str, Any]) -> Made:
    runs = [(str(role), int(count)) for role, count in found.pop("runs")]
    error, params = ErrorStats(**found.pop("error")), unplain(found.pop("params"))
    return Made(**found, runs=runs, error=error, params=params)
