"""Limit the loss of packed tiers: measure the perplexity of a tier on a text before it is marked as complete."""

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
"""Default limit on the relative rise of a tier's perplexity over the reference's."""
TEXT = str(files("ingot") / "demo" / "data" / "heldout.txt")
"""English prose that ships with Ingot; tiers of 3 bits are measured on it by default."""
_LONGEST = 64 << 20


class PerplexityGate:
    """A gate (``ingot.ext.squish.tiers.gate.Gate``) that measures perplexities of the source tensors and of a tier.

    One model is in memory at a time, as ``load_model`` loads it. The reference model is decoded from the source
    tensors, or mapped from a complete, exact tier if there is one. No tier is built for it.

    Parameters
    ----------
    folder : path
        The Squish directory, with config.json and tokenizer.
    text : path
        Text of the measurement; see ``evaluate``.
    max_rise : float
        Limit on the relative rise of the perplexity: 0.02 is 2 %.
    protocol : Protocol, optional
        Number and size of the windows of text.
    max_ram : int or str, optional
        Memory limit of ``load_model``.

    Raises
    ------
    UsageError
        ``tier.max-rise``: not a finite number of at least 0; ``store.missing``: the text does not exist.
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
            raise UsageError(f"expected a maximal rise of at least 0, found {max_rise!r}", rule="tier.max-rise")
        self.max_rise = float(max_rise)
        self._folder = Location.parse(folder)
        self._text = Location.parse(text)
        self._protocol = protocol or Protocol()
        self._loading = Loading(cache=False, max_ram=max_ram)
        self._digest = _digest(self._text)
        self._prefix: tuple[int, ...] | None = None

    @property
    def text(self) -> str:
        """The identity of the measurement, as text.

        It contains the digest of the evaluation text, and the number and size of its windows. If the tokenizer adds
        tokens before each text, it also contains the ids of these tokens.

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
        """Return the perplexity of the source tensors. Raises the errors of ``evaluate``."""
        return self.perplexity(self._folder)

    def perplexity(self, tier: AnyPath) -> float:
        """Return the perplexity of the weights at ``tier``. Raises the errors of ``evaluate``."""
        return evaluate(tier, self._text, None, replace(self._protocol, keep_packed=False), self._loading).perplexity


def _digest(text: Location) -> str:
    store, name = text.find_file()
    hasher = Crc32c()
    hasher.update(store.head(name, _LONGEST))
    return hasher.text()
