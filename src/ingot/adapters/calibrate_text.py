"""The windows of a text that a model is calibrated on; an encoder's begin and end as its tokenizer has it."""

from __future__ import annotations

from importlib import resources
from typing import Any

from ingot.adapters.calibration import BUILT_IN, CalibrateOptions
from ingot.adapters.evaluate import cut_windows, read_text
from ingot.adapters.transformers_tokenizer import load_tokenizer
from ingot.core.extras import require
from ingot.stores.table import location_of

_FILE = "calibration.txt"  # written for Ingot; CC0-1.0


def windows_of(options: CalibrateOptions, length: int, *, encoder: bool) -> tuple[Any, str]:
    """Return tokens, i64 [windows, length], and what they are of.

    Raises
    ------
    UsageError
        ``eval.text``: no text in UTF-8, or fewer tokens than a window.
    """
    built_in = options.text == BUILT_IN or options.text is None
    where = "text that Ingot ships" if built_in else f"text {location_of(options.text or '')}"
    content = default_text() if built_in else read_text(options.text or "", length * options.samples)
    tokenizer = load_tokenizer(options.model)
    first, last = _ends(tokenizer) if encoder else ([], [])
    inner = max(length - len(first) - len(last), 1)
    windows = cut_windows(tokenizer, content, (inner, options.samples), where)
    if not first and not last:
        return windows, where
    torch = require("torch", "torch")
    before, behind = (torch.tensor(ids, dtype=torch.int64).expand(len(windows), -1) for ids in (first, last))
    return torch.cat([before, windows, behind], 1).contiguous(), where


def default_text() -> str:
    """Return the text that Ingot ships: prose in many languages, and code (``spec/calibration.md``)."""
    return resources.files("ingot.adapters").joinpath(_FILE).read_text("utf-8")


def _ends(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the tokens that the tokenizer puts before and behind a text."""
    plain = tokenizer("a", add_special_tokens=False, verbose=False).input_ids
    whole = tokenizer("a", verbose=False).input_ids
    at = next((start for start in range(len(whole)) if whole[start : start + len(plain)] == plain), None)
    return ([], []) if at is None else (whole[:at], whole[at + len(plain) :])
