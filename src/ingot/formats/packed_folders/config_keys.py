"""The keys of a ``quantization_config`` that a packed folder format supports, and the refusal of every other key.

Each format has one table. A reader that skips an unknown key may read other weights than the writer meant: an online
rotation, for example, is one key. So every key is used, irrelevant for a stated reason, or refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ingot.errors import UnsupportedError
from ingot.naming.config import CONFIG

RULE = "interop.config-key"
ANY = "*"
"""The name in a table that matches every name: of a group, a layer or a pattern."""

_MAX_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Key:
    """An entry of a table of keys: whether Ingot uses, ignores or refuses a key of ``quantization_config``, and why.

    Parameters
    ----------
    note : str
        How the reader uses the value, or why the value does not change the weights; for a refused key, the meaning of
        the value.
    use : str
        ``used``, ``irrelevant`` or ``refused``.
    allowed : tuple
        Values of a refused key that are not refused.
    inner : mapping, optional
        The table of the object that is the value, or of each object in the list that is the value.
    """

    note: str
    use: str
    allowed: tuple[Any, ...] = ()
    inner: Table | None = None


Table = Mapping[str, Key]


def used(note: str, inner: Table | None = None) -> Key:
    """Return a key whose value the reader or a report uses."""
    return Key(note, "used", inner=inner)


def irrelevant(note: str, inner: Table | None = None) -> Key:
    """Return a key whose value does not change the weights; ``note`` states why."""
    return Key(note, "irrelevant", inner=inner)


def refused(meaning: str, *allowed: Any) -> Key:
    """Return a key whose value the reader refuses, unless it is empty or one of ``allowed``."""
    return Key(meaning, "refused", allowed)


def repeated(key: Key, names: str) -> dict[str, Key]:
    """Return a table in which each of ``names``, separated by spaces, has the entry ``key``."""
    return dict.fromkeys(names.split(), key)


def require_known_keys(config: Mapping[str, Any], table: Table, dialect: str, path: str) -> None:
    """Raise ``UnsupportedError`` ``interop.config-key`` for the first key that is refused or in no table.

    Keys with the value null are skipped: null means that an option is not set.
    """
    for name, value in config.items():
        if value is None:
            continue
        key, location = table.get(name) or table.get(ANY), f"{path}.{name[:_MAX_SHOWN]}"
        if key is None:
            raise UnsupportedError(
                f"expected only supported keys of {dialect}, found an unknown key, which may change the weights: "
                "reading may give other weights "
                "than its writer meant; use a newer Ingot, or remove the key if its documentation says that it does "
                "not concern the weights",
                rule=RULE,
                where=location,
            )
        if key.use == "refused" and not _is_empty(value) and value not in key.allowed:
            expected = " or ".join(repr(item) for item in key.allowed) or "no such key"
            raise UnsupportedError(
                f"expected {expected}, found {_describe(value)}: {key.note}", rule=RULE, where=location
            )
        if key.inner is not None and not _is_empty(value):
            for item in _objects(value, dialect, location):
                require_known_keys(item, key.inner, dialect, location)


def location_of(key: str) -> str:
    """Return the text that names the object under ``key`` of ``config.json`` in error messages."""
    return f"{CONFIG}: {key}"


def _is_empty(value: Any) -> bool:
    return value is False or (isinstance(value, str | list | dict) and not value)


def _objects(value: Any, dialect: str, location: str) -> Iterable[Mapping[str, Any]]:
    items = value if isinstance(value, list) else [value]
    for item in items:
        if not isinstance(item, dict):
            raise UnsupportedError(
                f"expected an object with keys of {dialect}, found {_describe(item)}", rule=RULE, where=location
            )
    return items


def _describe(value: Any) -> str:
    text = repr(value) if isinstance(value, str | int | float) else type(value).__name__
    return text[:_MAX_SHOWN]
