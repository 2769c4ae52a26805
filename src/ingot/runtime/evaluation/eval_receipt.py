"""Receipts of evaluations: the text and how it was read, the reference, and the measured figures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ingot.artifacts.identity import content_id
from ingot.artifacts.open import open_source
from ingot.errors import INGOT_VERSION
from ingot.inspect.receipt import add_receipt
from ingot.runtime.evaluation.eval_report import Evaluation
from ingot.runtime.loading.options import EXACT, Measures, Protocol
from ingot.stores.location import Location

FIGURE_NAMES = (
    "perplexity",
    "reference_perplexity",
    "perplexity_ratio",
    "kl",
    "kl_median",
    "kl_p99",
    "kl_max",
    "agreement",
    "top_k",
    "compute_kl",
)


def write_receipt(
    result: Evaluation,
    location: Location,
    text: Location,
    reference: Location | None,
    protocol: Protocol,
    measures: Measures,
) -> str:
    """Add an evaluation to the receipt of an artifact. Raises the errors of ``add_receipt``.

    The receipt contains the names of files without their folders, which may be private.
    """
    compared = None if reference is None else {"name": reference.name, "weights": _content(reference)}
    subject = {
        "kind": "eval",
        "text": {"name": text.name, "tokens": result.tokens},
        "window": protocol.window,
        "sequences": result.sequences,
        "dtype": str(protocol.dtype),
        "keep_packed": protocol.keep_packed,
        "reference": compared,
        **({"window_prefix": [asdict(token) for token in result.window_prefix]} if result.window_prefix else {}),
        **({} if result.compute == EXACT else {"compute": result.compute}),
        **({} if result.kv_cache is None else {"kv_cache": result.kv_cache.kind}),
    }
    figures = {name: value for name in FIGURE_NAMES if (value := getattr(result, name)) is not None}
    entry: dict[str, Any] = {"of": subject, "by": f"ingot {INGOT_VERSION}", "figures": figures}
    if measures.top_k is not None:
        entry["top_k"] = measures.top_k
    if result.intervals:
        entry |= {"intervals": result.intervals, "resamples": measures.resamples, "seed": measures.seed}
    if result.layers:
        layers = [asdict(item) for item in result.layers]
        entry |= {"layers": layers, "departs": result.departs, "departing": result.departing}
    if result.gate:
        entry["gate"] = [asdict(item) for item in result.gate]
    return add_receipt(location, finite(entry), measures.progress)


def finite(value: Any) -> Any:
    """Return JSON-like data with None instead of infinities and NaN, which JSON cannot express."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def _content(location: Location) -> str:
    source = open_source(location, io="pread")
    try:
        return content_id(source.view())
    finally:
        source.close()
