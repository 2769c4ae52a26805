"""What an operation's result would lack of its sources: the account that is settled before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ingot.artifacts.attachments import KINDS, WITH_WEIGHTS
from ingot.formats.base import Format
from ingot.model.account import Account, Omission, settle
from ingot.model.checkpoint import Checkpoint
from ingot.recipes.recipe import Patterns

_NOT_WRITTEN = "nothing in the result is made of it"


def account_of_conversion(
    source: Checkpoint, view: Checkpoint, written: Iterable[str], format: Format, drop: Sequence[str]
) -> Account:
    """Return the account of a conversion.

    Parameters
    ----------
    source : Checkpoint
        As it was opened.
    view : Checkpoint
        The source after all views; made of ``source``.
    written : iterable of str
        The tensors of ``view`` that the plan writes.
    format : Format
        The target's.
    drop : sequence of str
        Patterns of names whose loss the caller accepts.
    """
    accepts = Patterns(tuple(drop))
    carried = {origin for name in written for origin in view.origins_of(name)}
    account = settle(source, carried, view.omissions, accepts, _NOT_WRITTEN)
    stays_in_program = _keeps_program(source, view, format)
    unread = {} if stays_in_program else view.unread
    attachments = {
        kind: f"{format.name} carries no {KINDS[kind]}"
        for kind in source.attachments.names()
        if kind in WITH_WEIGHTS and kind not in format.traits.attachments
    }
    return account + account_of_unread({**unread, **attachments}, drop)


def account_of_unread(unread: dict[str, str], drop: Sequence[str]) -> Account:
    """Return the account of what readers left out: dropped where a pattern accepts it, else lost."""
    accepts = Patterns(tuple(drop))
    dropped = {name: reason for name, reason in unread.items() if accepts(name)}
    return Account({}, dropped, {name: reason for name, reason in unread.items() if name not in dropped})


def unread_of(checkpoints: Iterable[Checkpoint]) -> dict[str, str]:
    """Return what the readers of several checkpoints left out: name to reason."""
    return {name: reason for checkpoint in checkpoints for name, reason in checkpoint.unread.items()}


def account_of_reading(checkpoints: Sequence[Checkpoint], location: str, drop: Sequence[str]) -> Account:
    """Return the account of an operation that uses every tensor of some checkpoints.

    Raises ``UnsupportedError`` ``account.lost``: a reader left something out, and no pattern of ``drop`` accepts it.
    """
    account = account_of_unread(unread_of(checkpoints), drop)
    account.require_complete(location)
    return account


def dropped(checkpoint: Checkpoint, drop: Sequence[str]) -> dict[str, Omission]:
    """Return the tensors that patterns accept to lose; they are left out even if the target could hold them."""
    if not drop:
        return {}
    accepts = Patterns(tuple(drop))
    return {name: Omission("") for name in checkpoint if accepts(name)}


def unused_patterns(drop: Sequence[str], account: Account) -> list[str]:
    """Return a warning for each pattern of ``drop`` that fits no tensor."""
    names = [*account.dropped]
    return [
        f"--drop {pattern}: no tensor, and nothing beside the weights, has such a name"
        for pattern in drop
        if not any(map(Patterns((pattern,)), names))
    ]


def _keeps_program(source: Checkpoint, view: Checkpoint, format: Format) -> bool:
    """Whether the target is the source's own program or graph with new weights: it keeps what was not read."""
    own = source.attachments
    now = view.attachments
    program = own.program is not None and now.program is own.program and "program" in format.traits.attachments
    return program or (own.graph is not None and now.graph is own.graph and "graph" in format.traits.attachments)
