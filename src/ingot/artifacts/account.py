"""Accounts of operations: the source tensors that a result would lack, determined before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ingot.artifacts.attachments import ATTACHMENT_TITLES, WITH_WEIGHTS
from ingot.formats.base import Format
from ingot.model.account import Account, Omission, settle
from ingot.model.checkpoint import Checkpoint
from ingot.recipes.recipe import Patterns

_NOT_WRITTEN = "no tensor of the result is computed from it"


def account_of_conversion(
    source: Checkpoint, view: Checkpoint, written: Iterable[str], format: Format, drop: Sequence[str]
) -> Account:
    """Return the account of a conversion: for each tensor of ``source``, whether the result contains it.

    Parameters
    ----------
    source : Checkpoint
        The opened checkpoint.
    view : Checkpoint
        The result of all views of ``source``.
    written : iterable of str
        The tensors of ``view`` that the plan writes.
    format : Format
        The format of the target.
    drop : sequence of str
        Patterns of names of tensors whose loss the caller accepts.
    """
    accepts = Patterns(tuple(drop))
    carried = {origin for name in written for origin in view.origins_of(name)}
    account = settle(source, carried, view.omissions, accepts, _NOT_WRITTEN)
    stays_in_program = _keeps_program(source, view, format)
    unread = {} if stays_in_program else view.unread
    attachments = {
        name: f"{format.name} carries no {ATTACHMENT_TITLES[name]}"
        for name in source.attachments.names()
        if name in WITH_WEIGHTS and name not in format.traits.attachments
    }
    return account + account_of_unread({**unread, **attachments}, drop)


def account_of_unread(unread: dict[str, str], drop: Sequence[str]) -> Account:
    """Return the account of unread tensors: dropped if a pattern of ``drop`` accepts the name, else missing."""
    accepts = Patterns(tuple(drop))
    dropped = {name: reason for name, reason in unread.items() if accepts(name)}
    return Account({}, dropped, {name: reason for name, reason in unread.items() if name not in dropped})


def unread_of(checkpoints: Iterable[Checkpoint]) -> dict[str, str]:
    """Return the tensors that the readers of ``checkpoints`` did not read: name to reason."""
    return {name: reason for checkpoint in checkpoints for name, reason in checkpoint.unread.items()}


def account_of_reading(checkpoints: Sequence[Checkpoint], location: str, drop: Sequence[str]) -> Account:
    """Return the account of an operation that reads every tensor of ``checkpoints``.

    Raises ``UnsupportedError`` ``account.lost`` if a reader left out a tensor that no pattern of ``drop`` accepts.
    """
    account = account_of_unread(unread_of(checkpoints), drop)
    account.require_complete(location)
    return account


def dropped_omissions(checkpoint: Checkpoint, drop: Sequence[str]) -> dict[str, Omission]:
    """Return an omission for each tensor whose name matches ``drop``, even if the target supports the tensor."""
    if not drop:
        return {}
    accepts = Patterns(tuple(drop))
    return {name: Omission("") for name in checkpoint if accepts(name)}


def unused_patterns(drop: Sequence[str], account: Account) -> list[str]:
    """Return a warning for each pattern of ``drop`` that matches no dropped name."""
    names = [*account.dropped]
    return [
        f"--drop {pattern}: no tensor or attachment has a name that matches"
        for pattern in drop
        if not any(map(Patterns((pattern,)), names))
    ]


def _keeps_program(source: Checkpoint, view: Checkpoint, format: Format) -> bool:
    """Return whether the target is a copy of the source's program or graph.

    Such a copy also contains the constants that the reader left out.
    """
    before = source.attachments
    after = view.attachments
    program = before.program is not None and after.program is before.program and "program" in format.traits.attachments
    return program or (
        before.graph is not None and after.graph is before.graph and "graph" in format.traits.attachments
    )
