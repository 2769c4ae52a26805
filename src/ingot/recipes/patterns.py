"""Name patterns of recipes: globs, and regular expressions behind ``re:``."""

from __future__ import annotations

import fnmatch
import re

from ingot.errors import UsageError

_SPECIAL = re.compile(r"[*?\[]")


class Patterns:
    """A set of patterns over whole names; call it to ask whether any of them fits.

    A glob (``*``, ``?``, ``[abc]``, ``[!abc]``; ``*`` crosses dots and newlines) must fit the whole name. A regular
    expression must match from the first character on and may end before the last, as llm-compressor's do.

    Raises
    ------
    UsageError
        Not a regular expression (``recipe.pattern``).
    """

    def __init__(self, texts: tuple[str, ...]) -> None:
        globs = [text for text in texts if not text.startswith("re:")]
        # The globs that most rules are made of, `*word*`, need no regular expression.
        words = [text for text in globs if len(text) > 1 and text[0] == text[-1] == "*" and not _special(text[1:-1])]
        others = [text for text in globs if text not in words]
        self._words = tuple(text[1:-1] for text in words)
        self._patterns = [re.compile("|".join(map(fnmatch.translate, others)))] if others else []
        self._patterns += [_regex(text.removeprefix("re:")) for text in texts if text.startswith("re:")]

    def __call__(self, name: str) -> bool:
        for word in self._words:
            if word in name:
                return True
        return any(pattern.match(name) for pattern in self._patterns)


def exactly(name: str) -> str:
    """Return a pattern that fits this name alone; globs would read brackets and stars."""
    return f"re:{re.escape(name)}\\Z" if _special(name) or name.startswith("re:") else name


def _special(text: str) -> bool:
    return _SPECIAL.search(text) is not None


def _regex(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text, re.DOTALL)
    except re.error as error:
        raise UsageError(f"not a regular expression: {text!r}: {error}", rule="recipe.pattern") from error
