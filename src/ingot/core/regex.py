"""Regular expressions that match in time proportional to the text, for patterns from untrusted files.

Python's ``re`` backtracks, so ``(.*.*)*x`` on a name of 60 characters never ends. Here a text is read once, from its
last character to its first. At each position, the nodes of the expression from which the remaining text matches form a
set. Sets are cached, and most texts need no new set. The syntax is Python's, read by the parser of ``re``. Expressions
that cannot be matched this way are refused: backreferences, lookbehind, conditions, atomic groups, possessive repeats.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from typing import Any

MAX_NODES = 2000
"""The limit of an expression's nodes: a character is one node, and ``x{1,500}`` has 500."""

_MAX_STATES = 1 << 12
_UNSUPPORTED = {
    "GROUPREF": "a backreference",
    "GROUPREF_EXISTS": "a condition",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive repeat",
}
_TYPES = re.ASCII | re.LOCALE | re.UNICODE
# The parser and the compiler of ``re``.
_parser: Any = import_module("re._parser")
_compiler: Any = import_module("re._compiler")

Position = tuple[str, str, bool]
"""The characters before and after a position (empty at an end of the text), and whether the second one is the last."""
Condition = Callable[[Position], bool]


class RegexError(ValueError):
    """The text is not a regular expression, or not a supported one."""


class Regex:
    """A regular expression that matches at the beginning of a text, as ``re.match`` does.

    Parameters
    ----------
    text : str
    flags : int
        The flags of ``re``.

    Raises
    ------
    RegexError
        The text is not a regular expression, or cannot be matched in bounded time.
    """

    def __init__(self, text: str, flags: int = 0) -> None:
        try:
            parsed = _parser.parse(text, flags)
            flags = parsed.state.flags
            self._program = _Program(parsed, flags)
        except (re.error, OverflowError, RecursionError) as error:
            raise RegexError(f"not a regular expression: {text[:200]!r}: {error}") from error
        self._prefix = _literal_prefix(parsed, flags)
        self._states: dict[tuple[Any, ...], _State] = {}
        self._end = _State(0, ())

    def matches(self, text: str) -> bool:
        """Return whether the expression matches ``text`` from its beginning, as ``re.match`` does."""
        if not text.startswith(self._prefix):
            return False
        state = self._end
        after = ""
        sees_before = self._program.sees_before
        for index in range(len(text), -1, -1):
            before = text[index - 1] if index else ""
            position = (before if sees_before else before and ".", after, index == len(text) - 1)
            cached = state.steps.get(position)
            state = self._step(state, position) if cached is None else cached
            after = before
        return self._program.is_start(state)

    def _step(self, state: _State, position: Position) -> _State:
        if len(self._states) >= _MAX_STATES:
            self._states = {}
            self._end = _State(0, ())
        earlier = self._program.step(state, position)
        earlier = state.steps[position] = self._states.setdefault(earlier.key(), earlier)
        return earlier


class _State:
    """The set of nodes from which the remaining text matches.

    ``bits`` is the set as a bit mask, ``looks`` the states of the lookaheads, and ``steps`` caches the states at the
    position before.
    """

    __slots__ = ("bits", "looks", "steps")

    def __init__(self, bits: int, looks: tuple[_State, ...]) -> None:
        self.bits = bits
        self.looks = looks
        self.steps: dict[Position, _State] = {}

    def key(self) -> tuple[Any, ...]:
        return self.bits, *(look.key() for look in self.looks)


class _Program:
    """The nodes of an expression.

    ``_characters`` maps each node to the nodes that lead to it by a character, with the test of the character.
    ``_links`` maps each node to the nodes that lead to it without a character, with the condition of the step.
    """

    def __init__(self, parsed: Any, flags: int) -> None:
        self.looks: list[_Program] = []
        self.sees_before = False
        self._count = 1
        self._characters: dict[int, list[tuple[int, re.Pattern[str]]]] = {}
        self._links: dict[int, list[tuple[int, Condition | tuple[int, bool] | None]]] = {}
        self._tests: dict[tuple[str, int], re.Pattern[str]] = {}
        self._start = self._compiled(parsed, 0, flags)

    def is_start(self, state: _State) -> bool:
        """Return whether ``state`` contains the first node, so that the expression matches the text from here on."""
        return bool(state.bits >> self._start & 1)

    def step(self, state: _State, position: Position) -> _State:
        """Return the state at a position from ``state``, the state after the next character."""
        after = position[1]
        looks = tuple(
            look.step(state.looks[index] if state.looks else state, position) for index, look in enumerate(self.looks)
        )
        matched = [look.is_start(after_look) for look, after_look in zip(self.looks, looks, strict=True)]
        bits = 0
        waiting = [0]
        if after:
            for node, tests in self._characters.items():
                if state.bits >> node & 1:
                    waiting += [start for start, test in tests if test.fullmatch(after)]
        while waiting:
            node = waiting.pop()
            if bits >> node & 1:
                continue
            bits |= 1 << node
            for earlier, condition in self._links.get(node, ()):
                if condition is None:
                    waiting.append(earlier)
                elif isinstance(condition, tuple):
                    waiting += [earlier] if matched[condition[0]] == condition[1] else []
                elif condition(position):
                    waiting.append(earlier)
        return _State(bits, looks)

    def _node(self) -> int:
        self._count += 1
        if self._count > MAX_NODES:
            raise RegexError(
                f"expected a regular expression of at most {MAX_NODES} characters, repeats written out; write several "
                "shorter ones"
            )
        return self._count - 1

    def _link(self, node: int, to: int, condition: Condition | tuple[int, bool] | None = None) -> int:
        """Add a step from ``node`` to ``to`` that consumes no character, under a condition; return ``node``."""
        self._links.setdefault(to, []).append((node, condition))
        return node

    def _compiled(self, items: Iterable[Any], following: int, flags: int) -> int:
        """Add a sequence that leads to the node ``following``; return its first node."""
        for item in reversed(list(items)):
            following = self._item(str(item[0]), item, following, flags)
        return following

    def _item(self, name: str, item: Any, following: int, flags: int) -> int:
        value = item[1]
        if name == "SUBPATTERN":
            _, added, removed, inner = value
            return self._compiled(inner, following, _combined(flags, added, removed))
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            minimum, maximum, inner = value
            return self._repeat(minimum, maximum, inner, following, flags)
        node = self._node()
        if name in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            self._characters.setdefault(following, []).append((node, self._test(item, flags)))
        elif name == "BRANCH":
            for branch in value[1]:
                self._link(node, self._compiled(branch, following, flags))
        elif name == "AT":
            condition, sees_before = _assertion(str(value), flags)
            self.sees_before |= sees_before
            self._link(node, following, condition)
        elif name in ("ASSERT", "ASSERT_NOT") and value[0] > 0:
            look = _Program(value[1], flags)
            self._count += look._count
            self.sees_before |= look.sees_before
            self.looks.append(look)
            self._link(node, following, (len(self.looks) - 1, name == "ASSERT"))
        elif name != "FAILURE":  # an empty choice, which nothing leads to
            construct = _UNSUPPORTED.get(name, "lookbehind" if name in ("ASSERT", "ASSERT_NOT") else name.lower())
            raise RegexError(
                f"expected a regular expression that is matched in bounded time, found {construct}: write it without"
            )
        return node

    def _test(self, item: Any, flags: int) -> re.Pattern[str]:
        """Return a compiled expression of ``re`` that decides whether one character matches ``item``."""
        key = repr(item), flags
        if key not in self._tests:
            state = _parser.State()
            state.flags = flags
            self._tests[key] = _compiler.compile(_parser.SubPattern(state, [item]), flags)
        return self._tests[key]

    def _repeat(self, minimum: int, maximum: Any, inner: Any, following: int, flags: int) -> int:
        if maximum is _parser.MAXREPEAT:
            loop = self._link(self._node(), following)
            self._link(loop, self._compiled(inner, loop, flags))
            following = loop
        else:
            end = following
            for _ in range(int(maximum) - minimum):
                node = self._link(self._node(), end)
                self._link(node, self._compiled(inner, following, flags))
                following = node
        for _ in range(minimum):
            self._node()
            following = self._compiled(inner, following, flags)
        return following


def _literal_prefix(parsed: Any, flags: int) -> str:
    """Return the characters with which every text begins that an expression matches."""
    prefix = ""
    for op, value in parsed:
        if str(op) == "LITERAL" and not flags & re.IGNORECASE:
            prefix += chr(value)
        elif str(op) != "AT" or str(value) != "AT_BEGINNING_STRING":
            break
    return prefix


def _combined(flags: int, added: int, removed: int) -> int:
    """Return the flags within a group, as ``re`` combines them."""
    if added & _TYPES:
        flags &= ~_TYPES
    return (flags | added) & ~removed


@cache
def _word(flags: int) -> re.Pattern[str]:
    return re.compile(r"\w", flags)


def _assertion(name: str, flags: int) -> tuple[Condition, bool]:
    """Return the condition of an anchor or boundary, and whether it depends on the character before the position."""
    lines = bool(flags & re.MULTILINE)
    if name == "AT_BEGINNING" and lines:
        return (lambda position: position[0] in ("", "\n")), True
    if name in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
        return (lambda position: not position[0]), False
    if name == "AT_END" and lines:
        return (lambda position: position[1] in ("", "\n")), False
    if name == "AT_END":
        return (lambda position: not position[1] or (position[2] and position[1] == "\n")), False
    if name == "AT_END_STRING":
        return (lambda position: not position[1]), False
    word = _word(flags & re.ASCII)
    inner = name == "AT_NON_BOUNDARY"

    def condition(position: Position) -> bool:
        before, after = (word.fullmatch(char) is not None for char in position[:2])
        return (position[0] or position[1]) != "" and (before == after) is inner

    return condition, True
