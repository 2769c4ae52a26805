"""Views that rename, select and drop tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ingot.model.account import Omission
from ingot.model.checkpoint import Checkpoint
from ingot.model.reading.lazy import LazyMap
from ingot.model.reading.view import derive_checkpoint, with_name
from ingot.views.common import BuildTensor, lazy_tensors, require_names


def rename(checkpoint: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
    """Return the checkpoint with some tensors under other names, in the same order.

    Parameters
    ----------
    checkpoint : Checkpoint
    names : mapping of old to new names
        Old name to new name; two names may be exchanged.

    Raises
    ------
    UsageError
        ``tensor.unknown``; ``view.name``: two tensors would have one name; ``view.delta``.

    Examples
    --------
    >>> "head" in ingot.views.rename(ingot.open("model"), {"lm_head.weight": "head"})
    True
    """
    require_names(checkpoint, names)
    pairs = {name: names.get(name, name) for name in checkpoint}

    def named(old: str, new: str) -> BuildTensor:
        return lambda: with_name(checkpoint[old], new)

    tensors = lazy_tensors(
        [(new, None if new == old else named(old, new), old) for old, new in pairs.items()], checkpoint
    )
    origins = {new: (old,) for old, new in pairs.items() if new != old}
    return derive_checkpoint(
        checkpoint,
        tensors,
        rename,
        dict(names),
        dict(names),
        origins=origins,
        importance={pairs[name]: weights for name, weights in checkpoint.importance.items()},
        aliases={pairs[name]: alias for name, alias in checkpoint.aliases.items()},
    )


def select(checkpoint: Checkpoint, names: Iterable[str]) -> Checkpoint:
    """Return the checkpoint with only the tensors ``names``, in its order; raise ``UsageError`` ``tensor.unknown``.

    Examples
    --------
    >>> list(ingot.views.select(ingot.open("model"), ["lm_head.weight"]))
    ['lm_head.weight']
    """
    return _select(checkpoint, set(names), checkpoint.omissions)


def drop(checkpoint: Checkpoint, names: Iterable[str]) -> Checkpoint:
    """Return the checkpoint without the tensors ``names``; raise ``UsageError`` ``tensor.unknown``.

    Examples
    --------
    >>> len(ingot.views.drop(ingot.open("model"), ["lm_head.weight"]))
    38
    """
    unwanted = set(names)
    require_names(checkpoint, unwanted)
    return select(checkpoint, [name for name in checkpoint if name not in unwanted])


def omit(checkpoint: Checkpoint, omissions: Mapping[str, Omission]) -> Checkpoint:
    """Return the checkpoint without some tensors. A conversion of the view reports the reasons in ``omissions``.

    Raises ``UsageError`` ``tensor.unknown``.
    """
    if not omissions:
        return checkpoint
    require_names(checkpoint, omissions)
    reasons = {origin: reason for name, reason in omissions.items() for origin in checkpoint.origins_of(name)}
    remaining = {name for name in checkpoint if name not in omissions}
    return _select(checkpoint, remaining, {**checkpoint.omissions, **reasons})


def _select(checkpoint: Checkpoint, selected: set[str], omissions: Mapping[str, Omission]) -> Checkpoint:
    require_names(checkpoint, selected)
    tensors = LazyMap(dict.fromkeys(name for name in checkpoint if name in selected), checkpoint.__getitem__)
    importance = {name: weights for name, weights in checkpoint.importance.items() if name in selected}
    names = sorted(selected)
    return derive_checkpoint(checkpoint, tensors, select, names, names, importance=importance, omissions=omissions)
