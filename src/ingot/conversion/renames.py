"""The option ``--rename OLD=NEW``, which gives tensors of a source other names."""

from __future__ import annotations

from collections.abc import Sequence

from ingot.errors import UsageError
from ingot.model.checkpoint import Checkpoint
from ingot.views.names import rename

RULE = "convert.rename"


def renamed(checkpoint: Checkpoint, renames: Sequence[str]) -> Checkpoint:
    """Return the checkpoint with other names for the tensors that the options name.

    Parameters
    ----------
    checkpoint : Checkpoint
    renames : sequence of str
        ``OLD=NEW``. A star in OLD stands for any text, which the star in NEW repeats. Each tensor is renamed by the
        first option that matches its name.

    Raises
    ------
    UsageError
        ``convert.rename``: malformed, no tensor matches, or two tensors would have one name.
    """
    names: dict[str, str] = {}
    for text in renames:
        old, equals, new = text.partition("=")
        stars = old.count("*")
        if not equals or not old or not new or stars != new.count("*") or stars > 1:
            raise UsageError(
                f"expected --rename OLD=NEW, with one star on both sides or none, found {text!r:.200}",
                rule=RULE,
            )
        before, _, after = old.partition("*")
        shortest = len(before) + len(after)
        matches = [
            name
            for name in checkpoint
            if name == old or (stars and len(name) >= shortest and name.startswith(before) and name.endswith(after))
        ]
        if not matches:
            raise UsageError(f"no tensor has the name {old!r:.200}; ingot ls shows the names", rule=RULE)
        for name in matches:
            names.setdefault(name, new.replace("*", name[len(before) : len(name) - len(after)]))
    owners: dict[str, str] = {}
    for name in checkpoint:
        new = names.get(name, name)
        if new in owners:
            raise UsageError(f"{owners[new]} and {name} would both have the name {new}", rule=RULE)
        owners[new] = name
    changed = {old: new for old, new in names.items() if old != new}
    return rename(checkpoint, changed) if changed else checkpoint
