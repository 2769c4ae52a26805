"""Commands that run a written artifact in the programs that read its format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PROMPT = "Once upon a time"


@dataclass(frozen=True, slots=True)
class WrittenArtifact:
    """A written artifact: the folder or file at ``path`` of this machine.

    ``first`` is the path of its first weight file. ``generates`` is true if ``config.json`` and a tokenizer are
    present, so that a program can generate text.
    """

    path: str
    first: str
    folder: bool
    generates: bool
    metadata: Mapping[str, Any] = field(default_factory=dict)


def in_python(code: str, *texts: str) -> Sequence[str]:
    """Return the command that runs one line of Python, in which each ``{}`` becomes one of ``texts`` as a literal."""
    return "python", "-c", code.format(*(json.dumps(text, ensure_ascii=False) for text in texts))
