"""Checks of adapters for ``ingot verify``."""

from __future__ import annotations

from collections.abc import Iterator

from ingot.adapters.match import match
from ingot.adapters.read import RULE, adapter_from
from ingot.adapters.record import Adapter, factors_of
from ingot.artifacts.adapter_files import adapter_of
from ingot.artifacts.open import Source
from ingot.artifacts.open import open as open_checkpoint
from ingot.errors import CodecError, FormatError, UnsupportedError, UsageError
from ingot.inspect.findings import Finding, finding_of
from ingot.stores.location import AnyPath


def adapter_findings(source: Source, base: AnyPath | None) -> list[Finding]:
    """Return findings on an adapter: its settings, its tensors and values, and whether it fits ``base``.

    The list is empty if the source is not an adapter. Without ``base``, it is also empty if the adapter's method is not
    supported.

    Raises ``UsageError`` ``adapter.none`` if ``base`` is given and the source is not an adapter, and the errors of
    opening the base.
    """
    if adapter_of(source) is None:
        if base is not None:
            raise UsageError(
                "expected an adapter with --base, found weights of a model", rule=RULE, where=source.location
            )
        return []
    try:
        adapter = adapter_from(source.view(), source.store, source.location)
    except FormatError as error:
        return [finding_of(error, source.location)]
    except UnsupportedError as error:
        return [] if base is None else [finding_of(error, source.location)]
    findings = [*_value_findings(adapter)]
    if base is not None:
        with open_checkpoint(base) as opened:
            try:
                match(adapter, opened)
            except UnsupportedError as error:
                findings.append(finding_of(error, source.location))
    return findings


def _value_findings(adapter: Adapter) -> Iterator[Finding]:
    """Yield a finding for each factor with NaN or infinities."""
    for changes in adapter.changes.values():
        for item in changes:
            for factor in factors_of(item):
                try:
                    factor.values()
                except CodecError as error:
                    yield finding_of(error, adapter.location)
