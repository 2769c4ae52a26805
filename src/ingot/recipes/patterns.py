"""Name patterns of recipes: globs, and regular expressions behind ``re:``."""

from __future__ import annotations

import fnmatch
import re

from ingot.core.regex import Regex, RegexError
from ingot.errors import UsageError

_SPECIAL = re.compile(r"[*?\[]")


class Patterns:
    """A set of patterns over whole names; call it to ask whether any of them fits.

    A glob (``*``, ``?``, ``[abc]``, ``[!abc]``; ``*`` crosses dots and newlines) must fit the whole name. A regular
    expression must match from the first character on and may end before the last, as llm-compressor's do. The time of
    both grows with the name alone (``core.regex``).

    Raises
    ------
    UsageError
        ``recipe.pattern``: no regular expression, or one that needs backtracking or is too large.
    """

    def __init__(self, texts: tuple[str, ...]) -> None:
        globs = [text for text in texts if not text.startswith("re:")]
        # The globs that most rules are made of, `*word*`, need no regular expression.
        words = [text for text in globs if len(text) > 1 and text[0] == text[-1] == "*" and not _special(text[1:-1])]
        others = [text for text in globs if text not in words]
        self._words = tuple(text[1:-1] for text in words)
        # Globs become expressions without backtracking across stars (atomic groups, since Python 3.11).
        self._globs = re.compile("|".join(map(fnmatch.translate, others))) if others else None
        self._expressions = [_regex(text.removeprefix("re:")) for text in texts if text.startswith("re:")]

    def __call__(self, name: str) -> bool:
        for word in self._words:
            if word in name:
                return True
        if self._globs is not None and self._globs.match(name):
            return True
        return any(expression.matches(name) for expression in self._expressions)


def exactly(name: str) -> str:
    """Return a pattern that fits this name alone; globs would read brackets and stars."""
    return f"re:{re.escape(name)}\\Z" if _special(name) or name.startswith("re:") else name


def _special(text: str) -> bool:
    return _SPECIAL.search(text) is not None


def _regex(text: str) -> Regex:
    try:
        return Regex(text, re.DOTALL)
    except RegexError as error:
        raise UsageError(str(error), rule="recipe.pattern") from error
