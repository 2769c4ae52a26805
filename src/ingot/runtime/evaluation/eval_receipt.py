"""Receipts of evaluations: the text and how it was read, the reference, and the measured figures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import ingot
from ingot.artifacts.identity import content_id
from ingot.artifacts.open import checkpoint_of, open_source
from ingot.artifacts.options import AnyPath
from ingot.inspect.receipt import add_receipt
from ingot.runtime.loading.options import EXACT, Measures, Protocol
from ingot.stores.table import url_of

if TYPE_CHECKING:
    from ingot.runtime.evaluation.evaluate import Evaluation

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
    result: Evaluation, path: AnyPath, text: AnyPath, reference: AnyPath | None, protocol: Protocol, measures: Measures
) -> str:
    """Add an evaluation to the receipt of the artifact at ``path``. Raises the errors of ``add_receipt``.

    The receipt contains the names of files without their folders, which may be private.
    """
    compared = None if reference is None else {"name": _last(reference), "weights": _content(reference)}
    subject = {
        "kind": "eval",
        "text": {"name": _last(text), "tokens": result.tokens},
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
    entry: dict[str, Any] = {"of": subject, "by": f"ingot {ingot.__version__}", "figures": figures}
    if measures.top_k is not None:
        entry["top_k"] = measures.top_k
    if result.intervals:
        entry |= {"intervals": result.intervals, "resamples": measures.resamples, "seed": measures.seed}
    if result.layers:
        layers = [asdict(item) for item in result.layers]
        entry |= {"layers": layers, "departs": result.departs, "departing": result.departing}
    if result.gate:
        entry["gate"] = [asdict(item) for item in result.gate]
    return add_receipt(path, finite(entry), measures.progress)


def finite(value: Any) -> Any:
    """Return JSON-like data with None instead of infinities and NaN, which JSON cannot express."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def _last(path: AnyPath) -> str:
    return unquote(url_of(path).rstrip("/").rpartition("/")[2])


def _content(path: AnyPath) -> str:
    source = open_source(path, io="pread")
    try:
        return content_id(checkpoint_of(source))
    finally:
        source.close()
