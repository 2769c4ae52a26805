"""The base of an adapter in a library, which is found by the adapter's modules and checked by content id."""

from __future__ import annotations

from ingot.adapters.match import match
from ingot.adapters.read import adapter_from, open_adapter
from ingot.adapters.record import Adapter, factors_of
from ingot.artifacts.identity import content_id
from ingot.artifacts.open import Source
from ingot.artifacts.open import open as open_checkpoint
from ingot.errors import IngotError, UnsupportedError
from ingot.library.manifest import AdapterBase, Manifest
from ingot.library.options import AUTO
from ingot.library.place import OpenLibrary
from ingot.stores.location import AnyPath

RULE = "library.base"
_LISTED = 3


def require_sound(source: Source) -> None:
    """Read all of an adapter, and raise an error if it is damaged.

    The errors are ``FormatError`` and ``CodecError`` of ``open_adapter`` and ``Factor.values``. If Ingot does not
    support the adapter's method, nothing is read.
    """
    try:
        adapter = adapter_from(source.view(), source.store, source.location)
    except UnsupportedError:
        return
    for changes in adapter.changes.values():
        for item in changes:
            for factor in factors_of(item):
                factor.values()


def find_base(library: OpenLibrary, adapter_path: AnyPath, requested: str) -> tuple[AdapterBase | None, str]:
    """Return the base of an adapter, or None if it is not found, and a note about it.

    ``requested`` is the base's name, or ``auto``. With ``auto``, the candidates are the artifacts that have every
    module of the adapter with its shape. Candidates with the name that the adapter states for its base are preferred.
    If one candidate remains, it is the base.

    Raises the errors of ``open_adapter``, and of ``match`` for a requested base.
    """
    with open_adapter(adapter_path) as adapter:
        if requested != AUTO:
            manifest = library.manifest(requested)
            _require_match(library, adapter, requested)
            return _reference(library, manifest), f"adapter of {requested}"
        names = [name for name in library.names() if _fits(library, adapter, name)]
        declared = (adapter.base or "").rstrip("/")
        same_name = [name for name in names if declared in (name, name.rpartition("/")[2])]
        same_end = [name for name in names if declared.rpartition("/")[2] == name.rpartition("/")[2]]
        candidates = same_name or same_end or names
    if len(candidates) == 1:
        return _reference(library, library.manifest(candidates[0])), f"adapter of {candidates[0]}"
    if not candidates:
        return None, "the library has no base of this adapter; add the base, then the adapter again (--overwrite)"
    listed = ", ".join(candidates[:_LISTED])
    return None, f"{len(candidates)} artifacts fit the adapter ({listed}); name its base with --base"


def require_base(library: OpenLibrary, manifest: Manifest) -> str:
    """Return the name of an adapter's base.

    Raises ``UnsupportedError`` ``library.base`` if the artifact is no adapter with a base in this library, or if the
    base's values have changed.
    """
    base = manifest.base
    if base is None:
        raise UnsupportedError(
            "expected an adapter that was added with its base; add it again with --base NAME --overwrite",
            rule=RULE,
            where=manifest.name,
        )
    if not library.has(base.name):
        raise UnsupportedError(
            f"the adapter's base {base.name} is no longer in the library; add it again", rule=RULE, where=manifest.name
        )
    if library.manifest(base.name).digest() != base.manifest:
        with open_checkpoint(library.url_of(base.name)) as checkpoint:
            content = content_id(checkpoint)
        if content != base.content:
            raise UnsupportedError(
                f"{base.name} has changed since the adapter was added (content id {base.content}, now {content})",
                rule=RULE,
                where=manifest.name,
            )
    return base.name


def _reference(library: OpenLibrary, base: Manifest) -> AdapterBase:
    """Return the reference to a base. The content id is that in another adapter's reference to it, or is computed."""
    digest = base.digest()
    for name in library.names():
        try:
            sibling = library.manifest(name).base
        except IngotError:
            continue  # damaged, or removed by another process
        if sibling is not None and (sibling.name, sibling.manifest) == (base.name, digest):
            return sibling
    with open_checkpoint(library.url_of(base.name)) as checkpoint:
        return AdapterBase(base.name, content_id(checkpoint), digest)


def _require_match(library: OpenLibrary, adapter: Adapter, name: str) -> None:
    with open_checkpoint(library.url_of(name)) as checkpoint:
        match(adapter, checkpoint)


def _fits(library: OpenLibrary, adapter: Adapter, name: str) -> bool:
    try:
        if library.manifest(name).base is None:
            _require_match(library, adapter, name)
            return True
    except IngotError:
        pass
    return False
