"""Accounts of source tensors: which of them a result contains, and why the others are missing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from ingot.errors import UnsupportedError

LOST_RULE = "account.lost"
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Omission:
    """The reason why a view leaves a tensor out.

    ``superseded`` is true if the target runtime computes the tensor's values itself, and ``accepted`` if an option of
    the caller leaves the tensor out.
    """

    reason: str
    superseded: bool = False
    accepted: bool = False


@dataclass(frozen=True, slots=True)
class Account:
    """The source tensors that a result does not contain, in three groups.

    The result contains every source tensor that is in none of the groups: moved, repacked or encoded.

    Parameters
    ----------
    superseded : mapping of name to reason
        Tensors that the target runtime computes itself, such as rotary frequencies.
    dropped : mapping of name to reason
        Tensors whose loss the caller accepted with ``drop``.
    missing : mapping of name to reason
        All other tensors. A plan with missing tensors is refused.
    """

    superseded: Mapping[str, str] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether the result contains every source tensor that is not superseded."""
        return not (self.dropped or self.missing)

    def __add__(self, account: Account) -> Account:
        return Account(
            {**self.superseded, **account.superseded},
            {**self.dropped, **account.dropped},
            {**self.missing, **account.missing},
        )

    def require_complete(self, location: str) -> None:
        """Raise ``UnsupportedError`` ``account.lost`` if a tensor is missing."""
        if self.missing:
            count = len(self.missing)
            tensors = "1 tensor" if count == 1 else f"{count} tensors"
            raise UnsupportedError(
                f"the result would lack {tensors} of the source: {list_by_reason(self.missing)}; pass --drop PATTERN "
                "(drop=[...]) with their names to accept that",
                rule=LOST_RULE,
                where=location,
            )

    def notes(self) -> list[str]:
        """Return one sentence about superseded tensors and one about dropped tensors; none for an empty group."""
        notes = []
        if self.superseded:
            notes.append(f"left out, not needed by the target: {list_by_reason(self.superseded)}")
        if self.dropped:
            notes.append(f"dropped as requested: {list_by_reason(self.dropped)}")
        return notes


def describe_unread(unread: Mapping[str, str]) -> str:
    """Return a sentence about the tensors that a reader left out: name to reason. Empty if there are none."""
    return f"could not be read, and is left out here: {list_by_reason(unread)}" if unread else ""


def list_by_reason(reasons: Mapping[str, str]) -> str:
    """Return names grouped by their reason, the first ten of each: ``a, b (reason); c and 3 more (other reason)``."""
    groups: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        groups.setdefault(reason, []).append(name)
    return "; ".join(list_names(names) + (f" ({reason})" if reason else "") for reason, names in groups.items())


def list_names(names: Iterable[str]) -> str:
    """Return the first ten names and the count of the others."""
    shown = [*names]
    more = len(shown) - _SHOWN
    return ", ".join(name[:200] for name in shown[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def lost_tensors(omissions: Mapping[str, Omission]) -> dict[str, str]:
    """Return the omitted tensors whose values the target runtime does not compute itself: name to reason."""
    return {name: omission.reason for name, omission in omissions.items() if not omission.superseded}


def settle(
    names: Iterable[str],
    carried: Collection[str],
    omissions: Mapping[str, Omission],
    accepts: Callable[[str], bool],
    default: str,
) -> Account:
    """Return the account of a conversion: each source tensor in ``names`` is carried, superseded, dropped or missing.

    Parameters
    ----------
    names : iterable of str
        The tensors of the source.
    carried : collection of str
        The tensors whose values the result contains in full.
    omissions : mapping of name to Omission
        The reasons for which views left tensors out.
    accepts : callable
        Whether the caller accepts the loss of the tensor with the given name.
    default : str
        The reason of a tensor that is neither carried nor in ``omissions``.
    """
    superseded = dict[str, str]()
    dropped = dict[str, str]()
    missing = dict[str, str]()
    unknown = Omission(default)
    for name in names:
        if name in carried:
            continue
        omission = omissions.get(name, unknown)
        group = superseded if omission.superseded else dropped if omission.accepted or accepts(name) else missing
        group[name] = omission.reason
    return Account(superseded, dropped, missing)
