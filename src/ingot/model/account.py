"""The account of an operation's source tensors: whether each is in the result, and if not, why not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from ingot.errors import UnsupportedError

LOST = "account.lost"
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Omission:
    """Why a view leaves a tensor out; ``superseded`` if the target's program computes its values itself."""

    reason: str
    superseded: bool = False


@dataclass(frozen=True, slots=True)
class Account:
    """The source tensors that a result does not hold: name to reason, in three groups.

    Every source tensor that is in none of the groups is carried: moved, repacked or encoded.

    Parameters
    ----------
    superseded : mapping
        Values that the target's program computes itself, such as rotary frequencies.
    dropped : mapping
        Tensors whose loss the caller accepted with ``drop``.
    lost : mapping
        All others. A plan with lost tensors is refused.
    """

    superseded: Mapping[str, str] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether every source tensor is carried or superseded."""
        return not (self.dropped or self.lost)

    def __add__(self, other: Account) -> Account:
        return Account(
            {**self.superseded, **other.superseded},
            {**self.dropped, **other.dropped},
            {**self.lost, **other.lost},
        )

    def require_complete(self, location: str) -> None:
        """Raise ``UnsupportedError`` ``account.lost`` if a tensor would be lost."""
        if self.lost:
            count = len(self.lost)
            tensors = "1 tensor" if count == 1 else f"{count} tensors"
            raise UnsupportedError(
                f"the result would lack {tensors} of the source: {list_by_reason(self.lost)}; pass --drop PATTERN "
                "(drop=[...]) with their names to accept that",
                rule=LOST,
                where=location,
            )

    def notes(self) -> list[str]:
        """Return a sentence about the superseded and one about the dropped tensors, if there are any."""
        notes = []
        if self.superseded:
            notes.append(f"left out, not needed by the target: {list_by_reason(self.superseded)}")
        if self.dropped:
            notes.append(f"dropped as requested: {list_by_reason(self.dropped)}")
        return notes


def describe_unread(unread: Mapping[str, str]) -> str:
    """Return a sentence about what a reader left out; empty if nothing."""
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
    """Return the omitted tensors whose values the target's program does not compute itself: name to reason."""
    return {name: omission.reason for name, omission in omissions.items() if not omission.superseded}


def settle(
    names: Iterable[str],
    carried: Collection[str],
    omissions: Mapping[str, Omission],
    accepts: Callable[[str], bool],
    default: str,
) -> Account:
    """Return the account of the tensors ``names``.

    Parameters
    ----------
    names : iterable of str
        The source's tensors.
    carried : collection of str
        Those of which the result holds all values.
    omissions : mapping of name to Omission
        Why a view left a tensor out.
    accepts : callable
        Whether the caller accepts the loss of a tensor of this name.
    default : str
        The reason of a tensor that is neither carried nor in ``omissions``.
    """
    superseded = dict[str, str]()
    dropped = dict[str, str]()
    lost = dict[str, str]()
    unknown = Omission(default)
    for name in names:
        if name in carried:
            continue
        omission = omissions.get(name, unknown)
        group = superseded if omission.superseded else dropped if accepts(name) else lost
        group[name] = omission.reason
    return Account(superseded, dropped, lost)
