"""What a rule may do with a tensor: one way to store it, or several of which a measurement picks one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from ingot.codecs.base import Encoder
from ingot.codecs.table import CODECS
from ingot.core.bytes.encodings import ENCODINGS
from ingot.errors import UnsupportedError, UsageError
from ingot.model.layouts.base import resolve_codec
from ingot.quantization.choice import parse_quantizer

# What a codec that changes values may be used on: tensors of weights, never indices, masks or bytes of another format.
WEIGHT_DTYPES = ("f64", "f32", "f16", "bf16")

# Shapes of the weights that options are tried on; what every number up to 16 divides takes patterns of 3 in 5, say,
# and 256 blocks of ggml's.
_PROBED = ((64, 64), (64, 720720), (64, 256))

SMALLEST = "smallest"
ACCURATE = "accurate"
PICKS = (SMALLEST, ACCURATE)


@dataclass(frozen=True)
class Choice:
    """How a tensor is stored: a codec id, the codec's options, and the encoding of every part.

    With a ``quantizer`` numbers are chosen by what the matrix multiplies, and the codec only says how they are stored
    (``quantization.choice`` says what options there are then).

    Raises
    ------
    UsageError
        An unknown codec or encoding, an option that the codec refuses (its own rule, or ``recipe.options``), or
        ``zstd`` on a codec whose part sizes are not known beforehand (``recipe.encoding``).
    """

    codec: str
    options: Mapping[str, Any] = field(default_factory=dict)
    encoding: str = "raw"
    quantizer: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "codec", resolve_codec(self.codec))
        CODECS.get_or_refuse(self.codec)
        if self.quantizer is not None:
            if self.encoding != "raw":
                raise UsageError("expected encoding raw beside a quantizer", rule="recipe.encoding")
            parse_quantizer(self.quantizer, self.codec, self.options)
            return
        if self.encoding not in ENCODINGS:
            raise UsageError(
                f"expected encoding {' or '.join(ENCODINGS)}, found {self.encoding!r}", rule="recipe.encoding"
            )
        probe = self._probe()
        if self.encoding != "raw" and any(part.length is None for part in probe.parts):
            raise UsageError(
                f"codec {self.codec} knows its sizes only afterwards, so its parts cannot be {self.encoding}",
                rule="recipe.encoding",
            )

    def _probe(self) -> Encoder:
        """Return an encoder of some weights with these options; no codec has to take every type or shape of weights."""
        reason: UnsupportedError | None = None
        for shape in _PROBED:
            for dtype in ("f32", "bf16", "f16"):
                try:
                    return CODECS[self.codec].encoder(shape, dtype, self.options)
                except UnsupportedError as error:
                    reason = reason or error
        assert reason is not None
        raise UsageError(reason.message, rule="recipe.options") from reason

    @property
    def changes_values(self) -> bool:
        """Whether values may be rounded or cast, so that only tensors of weights may be given to it.

        A codec that is lossless keeps them, unless its option ``dtype`` asks for a cast.
        """
        return not CODECS[self.codec].lossless or "dtype" in self.options

    def __str__(self) -> str:
        """Name the way in a few words: ``dense zstd``, ``affine int4``, ``float_entropy fast``."""
        bits = self.options.get("bits")
        named = [self.options.get(key) for key in ("level", "footprint", "dtype")]
        words = [
            self.codec,
            f"int{bits}" if bits else None,
            *named,
            self.quantizer,
            self.encoding if self.encoding != "raw" else None,
        ]
        return " ".join(str(word) for word in words if word)


@dataclass(frozen=True)
class Measured:
    """Several ways to store a tensor; which one is measured when a conversion is planned, on a sample of the tensor.

    Parameters
    ----------
    pick : {"smallest", "accurate"}
        ``smallest``: the way that takes the fewest bytes. ``accurate``: the first whose signal-to-noise ratio reaches
        ``min_snr_db``, else the last.
    candidates : tuple of Choice
        In order of preference. One that a tensor or the target does not allow is left out.
    min_snr_db : float or None
        In decibels; of ``accurate`` alone.

    Raises
    ------
    UsageError
        ``recipe.pick``.
    """

    pick: str
    candidates: tuple[Choice, ...]
    min_snr_db: float | None = None

    def __post_init__(self) -> None:
        if self.pick not in PICKS:
            raise _wrong(f"pick {' or '.join(PICKS)}", self.pick)
        if not self.candidates:
            raise _wrong("at least one candidate", "none")
        if any(candidate.quantizer for candidate in self.candidates):
            raise _wrong("candidates without a quantizer: samples tell nothing of what it makes", "one with it")
        if self.pick == ACCURATE and (self.min_snr_db is None or not isfinite(self.min_snr_db)):
            raise _wrong('a finite min_snr_db with pick = "accurate"', self.min_snr_db)
        if self.pick == SMALLEST and self.min_snr_db is not None:
            raise _wrong('no min_snr_db with pick = "smallest"', self.min_snr_db)

    @property
    def changes_values(self) -> bool:
        """Whether any candidate may change values."""
        return any(candidate.changes_values for candidate in self.candidates)


def _wrong(expected: str, found: object) -> UsageError:
    return UsageError(f"expected {expected}, found {found!r}", rule="recipe.pick")
