"""Receipts: what was measured of an artifact goes into its file where that has room behind the weights, else beside it.

Into the file go receipts of a ``.zt`` (container 1) of its own: its manifest, which lies last and has a digest of
itself, is written anew; every byte before it is as it was. All other files, folders of several, and files with a seal
beside them, whose bytes are not to change, get a small file beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

from ingot.artifacts.identity import content_id
from ingot.artifacts.open import Source, open_source
from ingot.core.runtime.parallel import go_on
from ingot.core.runtime.progress import ProgressCallback
from ingot.errors import IngotError
from ingot.formats.base import Format
from ingot.model.reading.ranges import read_bytes
from ingot.model.receipt import KEY, MAX_RECEIPT, SUFFIX, Fault, Receipt, try_parse_receipt, with_entry
from ingot.model.seal import SUFFIX as SEALS
from ingot.model.store import OverwritePolicy
from ingot.stores.local import LocalTarget
from ingot.stores.location import AnyPath, Location

_CHUNK = 8 << 20


def add_receipt(path: AnyPath, entry: Mapping[str, Any], progress: ProgressCallback | None = None) -> str:
    """Add a measurement to the receipt of an artifact; reads all weights once, for their content id.

    Parameters
    ----------
    path : path or address
    entry : mapping
        JSON-like; ``of`` says what was measured how: a later entry of the same replaces it.
    progress : callable, optional

    Returns
    -------
    str
        Where the receipt is now.

    Raises
    ------
    UsageError
        ``store.not-writable``.
    IngotError
        What opening and decoding raise. What was there is there still, whole.
    """
    with closing(open_source(Location.parse(path), io="pread")) as source:
        identity = content_id(source.view(), progress=progress)
        old, _ = receipt_of(source)
        data = with_entry(old, identity, entry).encoded()
        source.require_unchanged()
        inside = _inside(source)
        if inside is None:
            target = _sidecar(source)
            target.write(data)
            return target.display
        return _rewritten(source, inside, data.decode())


def require_place(path: AnyPath) -> None:
    """Refuse, before anything is measured, an artifact that no receipt can be written to: errors as ``add_receipt``."""
    with closing(open_source(Location.parse(path))) as source:
        target = _sidecar(source) if _inside(source) is None else _file(source)
        target.stage(OverwritePolicy(allowed=True)).discard()


def receipt_of(source: Source) -> tuple[Receipt | None, Fault | None]:
    """Return the receipt of an artifact, in it or beside it, or the rule and message by which it cannot be read."""
    if source.catalog.receipt is not None:
        return try_parse_receipt(source.catalog.receipt.encode(), source.location)
    name = _name(source) + SUFFIX
    try:
        raw = source.store.read(name, MAX_RECEIPT, "receipt.fields")
    except IngotError as error:
        return None, None if error.rule == "store.missing" else (error.rule or "", f"receipt: {error.message}")
    return try_parse_receipt(raw, source.store.location_of(name))


def told(entry: Mapping[str, Any]) -> str:
    """Return an entry of a receipt as one line; a receipt may say anything, so nothing is taken for granted."""
    of, figures, gate = (entry.get(key) for key in ("of", "figures", "gate"))
    of = of if isinstance(of, Mapping) else {}
    text = of.get("text")
    reference = of.get("reference")
    on = f" on {text['name']}" if isinstance(text, Mapping) and "name" in text else ""
    read = f", {of['sequences']} x {of['window']} tokens" if "sequences" in of and "window" in of else ""
    beside = f", beside {reference['name']}" if isinstance(reference, Mapping) and "name" in reference else ""
    numbers = figures.items() if isinstance(figures, Mapping) else ()
    found = ", ".join(f"{name} {value:.6g}" for name, value in numbers if isinstance(value, int | float))
    judged = [each for each in gate if isinstance(each, Mapping)] if isinstance(gate, list) else []
    verdicts = ", ".join(f"{each.get('term')} {'met' if each.get('met') is True else 'missed'}" for each in judged)
    line = f"{of.get('kind')}{on}{read}{beside}: {found}" + (f"; gate: {verdicts}" if verdicts else "")
    return line[:600]


def _name(source: Source) -> str:
    return source.entry or "model"


def _file(source: Source) -> Location:
    return Location.in_store(source.store, source.entry)


def _sidecar(source: Source) -> Location:
    return Location.in_store(source.store, _name(source) + SUFFIX)


def _inside(source: Source) -> Format | None:
    """Return the format that can put a receipt into the file; None where it is to lie beside it."""
    one = [*source.catalog.headers] == [source.entry] and len(source.catalog.sources) == 1
    sealed = source.store.exists(source.entry + SEALS) if one else True
    return source.format if source.format.traits.carries_receipt and one and not sealed else None


def _rewritten(source: Source, format: Format, text: str) -> str:
    """Replace the file by one that carries a receipt, in one step."""
    file = source.catalog.sources[0]
    kept, ending = format.with_receipt(file, text)
    with _file(source).stage(OverwritePolicy(allowed=True)) as staging:
        staging.require_room(kept + len(ending), source.location)
        with closing(LocalTarget(staging.files).create("file")) as sink:
            for start in range(0, kept, _CHUNK):
                go_on()
                sink.write_at(start, read_bytes(file, start, min(_CHUNK, kept - start)))
            sink.write_at(kept, ending)
        source.require_unchanged()
        staging.publish(["file"])
    return f"{source.store.location_of(source.entry)} ({KEY})"
