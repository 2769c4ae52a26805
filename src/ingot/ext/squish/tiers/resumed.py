"""Runs in place that go on where a killed one stopped, and leave nothing behind where they fail."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from ingot.errors import IngotError, UsageError

T = TypeVar("T")


def resumed(run: Callable[[bool], T], discard: Callable[[], object]) -> T:
    """Return ``run(True)``, which takes over what an interrupted run of the same plan has left.

    What is of another plan or source is made anew. After an error ``discard`` removes what is staged; an interruption
    keeps it for the next run.
    """
    try:
        try:
            return run(True)
        except UsageError as error:
            if error.rule != "resume.changed":
                raise
        return run(False)
    except Exception:
        with suppress(IngotError):  # what went wrong first is told
            discard()
        raise
