"""Receipts: measurements of an artifact, stored in its file or in a small separate file.

A single ``.zt`` file of container 1 stores the receipt itself. Only its manifest is rewritten, which is at the end and
has its own digest. All other artifacts get a separate file in the same folder. These are other formats, folders with
several weight files, and files with a seal, because a sealed file must not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

from ingot.artifacts.identity import content_id
from ingot.artifacts.open import Source, open_source
from ingot.core.runtime.parallel import check_cancelled
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
    """Add a measurement to the receipt of an artifact. All weights are read once to compute their content id.

    Parameters
    ----------
    path : path or address
    entry : mapping
        Values that JSON can store; ``of`` describes the measurement. The entry replaces an earlier one with the same
        ``of``.
    progress : callable, optional

    Returns
    -------
    str
        The location of the receipt.

    Raises
    ------
    UsageError
        ``store.not-writable``.
    IngotError
        Errors of opening and decoding; the artifact is then unchanged.
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
        return _rewrite(source, inside, data.decode())


def require_writable(path: AnyPath) -> None:
    """Raise the errors of ``add_receipt`` if no receipt can be written; to be called before a measurement."""
    with closing(open_source(Location.parse(path))) as source:
        target = _sidecar(source) if _inside(source) is None else _file(source)
        target.stage(OverwritePolicy(allowed=True)).discard()


def receipt_of(source: Source) -> tuple[Receipt | None, Fault | None]:
    """Return the receipt of an artifact and None; for an invalid receipt, None and the rule and message of its error.

    Returns (None, None) if there is no receipt.
    """
    if source.catalog.receipt is not None:
        return try_parse_receipt(source.catalog.receipt.encode(), source.location)
    name = _name(source) + SUFFIX
    try:
        raw = source.store.read(name, MAX_RECEIPT, "receipt.fields")
    except IngotError as error:
        return None, None if error.rule == "store.missing" else (error.rule or "", f"receipt: {error.message}")
    return try_parse_receipt(raw, source.store.location_of(name))


def describe_entry(entry: Mapping[str, Any]) -> str:
    """Return an entry of a receipt as one line. The entry is untrusted, so every type is checked."""
    subject, figures, gate = (entry.get(key) for key in ("of", "figures", "gate"))
    subject = subject if isinstance(subject, Mapping) else {}
    text = subject.get("text")
    reference = subject.get("reference")
    on = f" on {text['name']}" if isinstance(text, Mapping) and "name" in text else ""
    has_tokens = "sequences" in subject and "window" in subject
    tokens = f", {subject['sequences']} x {subject['window']} tokens" if has_tokens else ""
    compared = f", beside {reference['name']}" if isinstance(reference, Mapping) and "name" in reference else ""
    numbers = figures.items() if isinstance(figures, Mapping) else ()
    results = ", ".join(f"{name} {value:.6g}" for name, value in numbers if isinstance(value, int | float))
    terms = [term for term in gate if isinstance(term, Mapping)] if isinstance(gate, list) else []
    verdicts = ", ".join(f"{term.get('term')} {'met' if term.get('met') is True else 'missed'}" for term in terms)
    line = f"{subject.get('kind')}{on}{tokens}{compared}: {results}" + (f"; gate: {verdicts}" if verdicts else "")
    return line[:600]


def _name(source: Source) -> str:
    return source.entry or "model"


def _file(source: Source) -> Location:
    return Location.in_store(source.store, source.entry)


def _sidecar(source: Source) -> Location:
    return Location.in_store(source.store, _name(source) + SUFFIX)


def _inside(source: Source) -> Format | None:
    """Return the artifact's format if its file can store a receipt; None if a separate file is necessary."""
    is_single = [*source.catalog.headers] == [source.entry] and len(source.catalog.sources) == 1
    sealed = source.store.exists(source.entry + SEALS) if is_single else True
    return source.format if source.format.traits.carries_receipt and is_single and not sealed else None


def _rewrite(source: Source, format: Format, text: str) -> str:
    """Replace the file atomically by one that contains a receipt; return the receipt's location."""
    file = source.catalog.sources[0]
    unchanged_bytes, ending = format.with_receipt(file, text)
    with _file(source).stage(OverwritePolicy(allowed=True)) as staging:
        staging.require_room(unchanged_bytes + len(ending), source.location)
        with closing(LocalTarget(staging.files).create("file")) as sink:
            for start in range(0, unchanged_bytes, _CHUNK):
                check_cancelled()
                sink.write_at(start, read_bytes(file, start, min(_CHUNK, unchanged_bytes - start)))
            sink.write_at(unchanged_bytes, ending)
        source.require_unchanged()
        staging.publish(["file"])
    return f"{source.store.location_of(source.entry)} ({KEY})"
