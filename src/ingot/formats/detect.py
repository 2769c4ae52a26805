"""Which format a file or folder is of, by its first bytes, then by its name.

What Ingot does not read is recognised and named in the error (``formats.foreign``).
"""

from __future__ import annotations

from collections.abc import Sequence

from ingot.errors import FormatError, IngotError, IntegrityError, UnsupportedError, UsageError
from ingot.formats.base import Format
from ingot.formats.shared.foreign import CUT_OFF, HEAD, WEIGHT_SUFFIXES, foreign_file
from ingot.formats.table import FORMATS
from ingot.model.store import Listed, Store
from ingot.naming.config import CONFIG

# So many files of a folder without a checkpoint are looked at for what they are instead.
_LOOKED_AT = 64
# Containers of others that our formats have inside their folders: what is wrong there, they say themselves.
_WITHIN = ("detect.npy", "detect.archive")


def detect_file(name: str, head: bytes) -> Format:
    """Return the format of a file called ``name`` that begins with ``head`` (its first ``HEAD`` bytes, or all it has).

    Raises
    ------
    FormatError
        ``detect.empty``: nothing in it.
    UnsupportedError
        ``detect.pickle``, ``detect.hdf5``, ...: another container, by its magic; ``detect.unknown``: none known.
    """
    if not head:
        raise FormatError("detect.empty", f"expected a checkpoint, found an empty file; {CUT_OFF}", where=name)
    foreign = foreign_file(name, head)
    formats = FORMATS.of_file(name, head) if foreign is None else FORMATS.of_plugins()
    for candidate in formats:
        if candidate.claims(name, head):
            return candidate
    if foreign is not None:
        raise foreign
    raise UnsupportedError(
        f"expected weights in a format that `ingot formats` lists, found a file that begins with {head[:8]!r}; give "
        "the file of the weights, or the folder that it lies in",
        rule="detect.unknown",
        where=name,
    )


def listing(store: Store) -> list[str]:
    """Return the names of a store's files, and of its folders with a slash at the end."""
    store = Listed(store)
    return [*store.names(), *(f"{name}/" for name in store.folders())]


def detect_folder(names: Sequence[str], store: Store | None = None) -> tuple[Format, str]:
    """Return the format and the entry file of a folder with these names, as ``listing`` makes them.

    ``store`` is the folder, for formats that have to look inside; without it they are passed over.

    A format whose artifact is the whole folder is taken before other weights in it if its sentinel is there
    (``Format.has_sentinel``). Without one, nothing says which of the two is meant. A program that was exported from a
    checkpoint (``FormatTraits.exported``) is passed over if the checkpoint is there too, and so is another form of the
    same model (``tiers``). A folder that holds nothing but squish's finalized arrays is of their format.

    Raises
    ------
    FormatError
        What a format looked at inside is damaged.
    UnsupportedError
        There is no checkpoint, but a file in another container, or in the place of one: see ``foreign_file``.
    UsageError
        ``detect.none``: no checkpoint among them; ``detect.several``: more than one, the caller has to choose.
    """
    claims: list[tuple[Format, str]] = []
    for candidate in FORMATS.of_folder(names):
        entry = candidate.entry(names)
        if entry is None or candidate.traits.last_resort:
            continue
        if candidate.traits.looks_inside:
            if store is None or not candidate.confirms(store):
                continue
            claims = [other for other in claims if other[1] != entry]
        elif any(entry == other for _, other in claims):
            continue
        claims.append((candidate, entry))
    claims = _meant(claims, store)
    if len(claims) == 1:
        return claims[0]
    if claims:
        files = " and ".join(f"{entry} (format {format.name})" for format, entry in claims)
        raise UsageError(
            f"expected one checkpoint in the folder, found {files}, and nothing says which one is meant: name the "
            "file, or move the other one away",
            rule="detect.several",
        )
    written = (format for _, format in FORMATS.available() if not format.traits.last_resort)
    known = tuple(suffix for format in written for suffix in format.suffixes)
    several = [name for name in names if name.lower().endswith(known)]
    if several:
        listed = ", ".join(several[:4]) + (", ..." if len(several) > 4 else "")
        raise UsageError(f"expected one checkpoint in the folder, found {listed}; name the file", rule="detect.several")
    last = _last_resort(names, store) or _fallback(names, store)
    if last is not None:
        return last
    if store is not None:
        _refuse_foreign(names, store)
    raise UsageError(
        f"expected a folder with a checkpoint ({', '.join(dict.fromkeys(known))}), found {_told(names)}",
        rule="detect.none",
    )


def _fallback(names: Sequence[str], store: Store | None) -> tuple[Format, str] | None:
    """Return the format and entry of a folder that no format claims, if one of them finds weights further inside."""
    if store is None:
        return None
    for candidate in FORMATS.of_folder(names):
        entry = candidate.fallback_entry(names, store)
        if entry is not None:
            return candidate, entry
    return None


def _told(names: Sequence[str]) -> str:
    """Return what lies in a folder without a checkpoint, and what to do about it."""
    if not names:
        return "an empty folder; was the download complete?"
    some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    if CONFIG in names:
        return f"{some}: a model without its weights; were they left out of the download?"
    return f"{some}; give the folder of the weights, or their file"


def _meant(claims: list[tuple[Format, str]], store: Store | None) -> list[tuple[Format, str]]:
    """Return the claims without what lies beside the checkpoint that is meant."""
    tiers = {name for format, _ in claims for name in format.traits.tiers}
    claims = [pair for pair in claims if pair[1] not in tiers]
    if len(claims) > 1:
        claims = [pair for pair in claims if not pair[0].traits.exported] or claims
    if len(claims) > 1:
        marked = [pair for pair in claims if store is not None and pair[0].has_sentinel(store)]
        claims = marked if len(marked) == 1 else claims
    return claims


def _last_resort(names: Sequence[str], store: Store | None) -> tuple[Format, str] | None:
    for candidate in FORMATS.of_folder(names):
        entry = candidate.entry(names) if candidate.traits.last_resort else None
        if entry is not None and (store is None or foreign_file(entry, store.head(entry, HEAD)) is None):
            return candidate, entry
    return None


def _refuse_foreign(names: Sequence[str], store: Store) -> None:
    """Raise the refusal of the first file in a folder that holds weights for others."""
    for name in [name for name in names if name.lower().endswith(WEIGHT_SUFFIXES)][:_LOOKED_AT]:
        reason = foreign_file(name, store.head(name, HEAD))
        if reason is not None:
            raise reason


def explain(error: IngotError, store: Store) -> IngotError:
    """Return why a format refused a file, in better words where the file is none of its own.

    A shard or an array in the middle of a checkpoint may be a Git LFS pointer, a web page or another container: that
    is what its reader meets as a header that makes no sense.
    """
    name = (error.where or "").removeprefix(f"{store.location}/").split(": ")[0]
    if not isinstance(error, FormatError | IntegrityError) or not name:
        return error
    try:
        head = store.head(name, HEAD)
    except IngotError:
        return error
    foreign = foreign_file(name, head)
    return error if foreign is None or foreign.rule in _WITHIN else foreign
