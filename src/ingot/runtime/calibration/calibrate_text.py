"""Windows of a text for calibration, with the special tokens that the tokenizer adds."""

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

    For a causal model, tokens that the tokenizer adds before a text replace the first tokens of each window. For an
    encoder, each window is a complete text: the tokens before and after it are added to the window's text.

    Raises
    ------
    UsageError
        ``eval.text``: the text is not UTF-8, or shorter than a window.
    """
    built_in = options.text == BUILT_IN or options.text is None
    text = Location.parse(options.text or "")
    source = "text that Ingot ships" if built_in else f"text {text}"
    content = default_text() if built_in else read_text(text, length * options.samples)
    tokenizer = load_tokenizer(options.model)
    surrounding = surrounding_tokens(tokenizer)
    shape = length, options.samples
    if encoder:
        tokens = cut_windows(tokenizer, content, shape, source, surrounding, contiguous=True)
    else:
        tokens = cut_windows(tokenizer, content, shape, source, Surrounding(surrounding.before))
    return Windows(tokens, named_tokens(tokenizer, surrounding.before)), source


def default_text() -> str:
    """Return the text in the package: prose in many languages, and code (``spec/calibration.md``)."""
    return resources.files("ingot.runtime.calibration").joinpath(_FILE).read_text("utf-8")
