"""The keys of ``quantization_config`` that a packed folder format supports; other keys are refused.

Each format has a table. If a reader skipped unknown keys, it might read wrong weights: an online rotation, for example,
is one key. Every key is therefore used, irrelevant for a stated reason, or refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ingot.errors import UnsupportedError
from ingot.naming.config import CONFIG

RULE = "interop.config-key"
ANY = "*"
"""The table entry that matches every name of a group, layer or pattern."""

_MAX_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Key:
    """A table entry for a key of ``quantization_config``: whether Ingot uses, ignores or refuses the key, and why.

    Parameters
    ----------
    note : str
        How the value is used, or why it does not change the weights, or, for a refused key, what it means.
    use : str
        ``used``, ``irrelevant`` or ``refused``.
    allowed : tuple
        Values of a refused key that are accepted.
    inner : mapping, optional
        The table for the value, if it is an object, or for the objects of a list.
    """

    note: str
    use: str
    allowed: tuple[Any, ...] = ()
    inner: Table | None = None


Table = Mapping[str, Key]


def used(note: str, inner: Table | None = None) -> Key:
    """Return a table entry for a key that the reader or a report uses."""
    return Key(note, "used", inner=inner)


def irrelevant(note: str, inner: Table | None = None) -> Key:
    """Return a table entry for a key that does not change the weights; ``note`` states why."""
    return Key(note, "irrelevant", inner=inner)


def refused(meaning: str, *allowed: Any) -> Key:
    """Return a table entry for a key that is refused unless its value is empty or in ``allowed``."""
    return Key(meaning, "refused", allowed)


def repeated(key: Key, names: str) -> dict[str, Key]:
    """Return a table with the entry ``key`` for each of ``names``, which are separated by spaces."""
    return dict.fromkeys(names.split(), key)


def require_known_keys(config: Mapping[str, Any], table: Table, dialect: str, path: str) -> None:
    """Raise ``UnsupportedError`` ``interop.config-key`` for the first key that is refused or not in the table.

    Keys with the value null are skipped, because null means that an option is not set.
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
    """Return the text for error messages that names the object under ``key`` of ``config.json``."""
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
