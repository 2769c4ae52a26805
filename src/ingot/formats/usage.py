"""Commands that run a written artifact, for the programs that a format is made for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PROMPT = "Once upon a time"


@dataclass(frozen=True, slots=True)
class Made:
    """What was written: the folder, or the file, at ``path`` of this machine.

    ``first`` is the path of its first weight file. ``generates`` tells whether there lies beside the weights what a
    model needs that goes on with a text: config.json and a tokenizer.
    """

    path: str
    first: str
    folder: bool
    generates: bool
    metadata: Mapping[str, Any] = field(default_factory=dict)


def in_python(code: str, *texts: str) -> Sequence[str]:
    """Return the command that runs one line of Python, with ``texts`` in it as literals, in place of each ``{}``."""
    return "python", "-c", code.format(*(json.dumps(text, ensure_ascii=False) for text in texts))
