"""The gate of packed tiers by perplexity: what a tier may cost on a text is measured before it counts."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from math import isfinite

from ingot.core.bytes.checksums import Crc32c
from ingot.errors import UsageError
from ingot.runtime.evaluation.evaluate import evaluate
from ingot.runtime.evaluation.special_tokens import surrounding_tokens
from ingot.runtime.loading.options import Loading, Protocol
from ingot.runtime.loading.transformers_tokenizer import load_tokenizer
from ingot.stores.location import AnyPath, Location

MAX_RISE = 0.02
"""By which share the perplexity of a tier may be above the reference's, where nobody says otherwise."""
TEXT = str(files("ingot") / "demo" / "data" / "heldout.txt")
"""English prose that ships with Ingot, which tiers of 3 bits are measured on where nobody names a text."""
_LONGEST = 64 << 20


class PerplexityGate:
    """Reads a text with the tensors that tiers are made from, and with a tier (``ingot.ext.squish.tiers.gate.Gate``).

    One model is held at a time, in the memory that ``load_model`` says. The reference is decoded from the tensors, or
    mapped from a complete tier that is exact; no tier is built for it.

    Parameters
    ----------
    folder : path
        The Squish directory, with config.json and tokenizer.
    text : path
        As for ``evaluate``.
    max_rise : float
        Share by which the perplexity may rise: 0.02 is 2 %.
    protocol : Protocol, optional
        How the text is read.
    max_ram : int or str, optional
        As for ``load_model``.

    Raises
    ------
    UsageError
        ``tier.max-rise``: no finite number of at least 0; ``store.missing``: no such text.
    """

    def __init__(
        self,
        folder: AnyPath,
        text: AnyPath,
        max_rise: float = MAX_RISE,
        protocol: Protocol | None = None,
        max_ram: int | str | None = None,
    ) -> None:
        if not (isfinite(max_rise) and max_rise >= 0):
            raise UsageError(f"expected a share of at least 0 to rise by, found {max_rise!r}", rule="tier.max-rise")
        self.max_rise = float(max_rise)
        self._folder = Location.parse(folder)
        self._text = Location.parse(text)
        self._protocol = protocol or Protocol()
        self._loading = Loading(cache=False, max_ram=max_ram)
        self._digest = _digest(self._text)
        self._prefix: tuple[int, ...] | None = None

    @property
    def text(self) -> str:
        """The text's digest, how many windows are read, and the tokens that each begins with, if any.

        Raises
        ------
        FormatError
            ``model.tokenizer``.
        """
        if self._prefix is None:
            self._prefix = surrounding_tokens(load_tokenizer(self._folder)).before
        after = " after " + " ".join(map(str, self._prefix)) if self._prefix else ""
        return f"{self._digest} {self._protocol.sequences} x {self._protocol.window}{after}"

    def reference(self) -> float:
        """Return the perplexity of the tensors; raises what ``evaluate`` raises."""
        return self.perplexity(self._folder)

    def perplexity(self, tier: AnyPath) -> float:
        """Return the perplexity of the weights at ``tier``; raises what ``evaluate`` raises."""
        return evaluate(tier, self._text, None, replace(self._protocol, keep_packed=False), self._loading).perplexity


def _digest(text: Location) -> str:
    store, name = text.find_file()
    hasher = Crc32c()
    hasher.update(store.head(name, _LONGEST))
    return hasher.text()
