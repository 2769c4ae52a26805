"""The windows of a text that a model is calibrated on: they begin, and an encoder's end, as its tokenizer has it."""

from __future__ import annotations

from importlib import resources

from ingot.runtime.calibration.calibration import BUILT_IN, CalibrateOptions
from ingot.runtime.evaluation.special_tokens import Surrounding, named_tokens, surrounding_tokens
from ingot.runtime.evaluation.windows import Windows, cut_windows, read_text
from ingot.runtime.loading.transformers_tokenizer import load_tokenizer
from ingot.stores.location import Location

_FILE = "calibration.txt"  # written for Ingot; CC0-1.0


def windows_of(options: CalibrateOptions, length: int, *, encoder: bool) -> tuple[Windows, str]:
    """Return windows of a text, and the text's name for reports.

    A causal model's begin with the tokens that the tokenizer puts before a text, in the place of the text's own. An
    encoder's windows are whole texts to it, and have the tokens before and after around the text's own.

    Raises
    ------
    UsageError
        ``eval.text``: no text in UTF-8, or fewer tokens than a window.
    """
    built_in = options.text == BUILT_IN or options.text is None
    text = Location.parse(options.text or "")
    where = "text that Ingot ships" if built_in else f"text {text}"
    content = default_text() if built_in else read_text(text, length * options.samples)
    tokenizer = load_tokenizer(options.model)
    surrounding = surrounding_tokens(tokenizer)
    shape = length, options.samples
    if encoder:
        tokens = cut_windows(tokenizer, content, shape, where, surrounding, contiguous=True)
    else:
        tokens = cut_windows(tokenizer, content, shape, where, Surrounding(surrounding.before))
    return Windows(tokens, named_tokens(tokenizer, surrounding.before)), where


def default_text() -> str:
    """Return the text that Ingot ships: prose in many languages, and code (``spec/calibration.md``)."""
    return resources.files("ingot.runtime.calibration").joinpath(_FILE).read_text("utf-8")
