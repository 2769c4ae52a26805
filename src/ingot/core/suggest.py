"""What somebody may have meant who wrote a name that is not there."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` where a known name is near to ``name``, else nothing.

    The known names may be many and long (tensors of a checkpoint): only the nearest is looked for.
    """
    close = difflib.get_close_matches(name, list(known), 1)
    return f" (did you mean {close[0]!r}?)" if close else ""
