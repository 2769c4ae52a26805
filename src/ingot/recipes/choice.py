"""Choices of a rule: one codec for a tensor, or several candidates from which a measurement picks one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from ingot.codecs.base import Encoder
from ingot.codecs.table import CODECS
from ingot.core.bytes.encodings import ENCODINGS
from ingot.core.bytes.packed import PACKED
from ingot.errors import UnsupportedError, UsageError
from ingot.model.layouts.base import resolve_codec
from ingot.quantization.choice import parse_quantizer

# Dtypes to which a codec that changes values may be applied: weights, not indices, masks or packed bytes.
WEIGHT_DTYPES = ("f64", "f32", "f16", "bf16")

# Shapes of weights for which options are checked. 720720 is a multiple of every number up to 16, so that patterns such
# as 3:5 fit; 256 columns fit ggml's blocks.
_PROBE_SHAPES = ((64, 64), (64, 720720), (64, 256))

SMALLEST = "smallest"
ACCURATE = "accurate"
PICKS = (SMALLEST, ACCURATE)


@dataclass(frozen=True)
class Choice:
    """How to store a tensor: a codec id, the codec's options, and the encoding of every part.

    If ``quantizer`` is set, it chooses the codes by statistics of the matrix's inputs, and the codec only determines
    the layout. ``quantization.choice`` describes the options of quantizers.

    Raises
    ------
    UsageError
        An unknown codec or encoding, an option that the codec refuses (the codec's rule, or ``recipe.options``), or
        ``zstd`` for a codec whose part sizes are known only after encoding (``recipe.encoding``).
    """

    codec: str
    options: Mapping[str, Any] = field(default_factory=dict)
    encoding: str = "raw"
    quantizer: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "codec", resolve_codec(self.codec))
        CODECS.get_or_refuse(self.codec)
        if self.quantizer is not None:
            if self.encoding not in ("raw", PACKED):
                raise UsageError(f"expected encoding raw or {PACKED} with a quantizer", rule="recipe.encoding")
            coded = parse_quantizer(self.quantizer, self.codec, self.options).grid.coded
            if coded is not None and self.encoding != PACKED:
                raise UsageError(f'expected encoding = "{PACKED}" with coded_bits', rule="recipe.encoding")
            return
        if self.encoding not in ENCODINGS:
            raise UsageError(
                f"expected encoding {' or '.join(ENCODINGS)}, found {self.encoding!r}", rule="recipe.encoding"
            )
        probe = self._probe()
        if self.encoding != "raw" and any(part.length is None for part in probe.parts):
            raise UsageError(
                f"the part sizes of codec {self.codec} are known only after encoding, so that its parts cannot be "
                f"{self.encoding}",
                rule="recipe.encoding",
            )

    def _probe(self) -> Encoder:
        """Return an encoder with these options for typical weights, which checks the options."""
        reason: UnsupportedError | None = None
        for shape in _PROBE_SHAPES:
            for dtype in ("f32", "bf16", "f16"):
                try:
                    return CODECS[self.codec].encoder(shape, dtype, self.options)
                except UnsupportedError as error:
                    reason = reason or error
        assert reason is not None
        raise UsageError(reason.message, rule="recipe.options") from reason

    @property
    def changes_values(self) -> bool:
        """Whether values may be rounded or cast, so that the choice is allowed for weights only.

        A lossless codec keeps values, unless its option ``dtype`` requests a cast.
        """
        return not CODECS[self.codec].lossless or "dtype" in self.options

    def __str__(self) -> str:
        """Return a short label: ``dense zstd``, ``affine int4``, ``float_entropy fast``."""
        bits = self.options.get("bits")
        labels = [
            self.codec,
            f"int{bits}" if bits else None,
            *(self.options.get(key) for key in ("level", "footprint", "dtype")),
            self.quantizer,
            self.encoding if self.encoding != "raw" else None,
        ]
        return " ".join(str(label) for label in labels if label)


@dataclass(frozen=True)
class Measured:
    """Several candidates for a tensor; a conversion's plan chooses one by measuring a sample of the tensor.

    Parameters
    ----------
    pick : {"smallest", "accurate"}
        ``smallest``: the candidate with the fewest bytes. ``accurate``: the first candidate whose signal-to-noise ratio
        reaches ``min_snr_db``, else the last candidate.
    candidates : tuple of Choice
        Candidates in order of preference; one that the tensor or the target does not allow is skipped.
    min_snr_db : float or None
        In decibels; only with ``accurate``.
    packed : bool
        Whether a tensor that is already quantized is kept, with parts in encoding ``ingot.packed/1`` if that is
        smaller; only with ``smallest``.

    Raises
    ------
    UsageError
        ``recipe.pick``.
    """

    pick: str
    candidates: tuple[Choice, ...]
    min_snr_db: float | None = None
    packed: bool = False

    def __post_init__(self) -> None:
        if self.pick not in PICKS:
            raise _pick_error(f"pick {' or '.join(PICKS)}", self.pick)
        if not self.candidates:
            raise _pick_error("at least one candidate", "none")
        if any(candidate.quantizer for candidate in self.candidates):
            raise _pick_error(
                "candidates without a quantizer, because a sample cannot measure its result", "one with a quantizer"
            )
        if self.pick == ACCURATE and (self.min_snr_db is None or not isfinite(self.min_snr_db)):
            raise _pick_error('a finite min_snr_db with pick = "accurate"', self.min_snr_db)
        if self.packed and self.pick != SMALLEST:
            raise _pick_error('pick = "smallest" with packed = true', self.pick)
        if self.pick == SMALLEST and self.min_snr_db is not None:
            raise _pick_error('no min_snr_db with pick = "smallest"', self.min_snr_db)

    @property
    def changes_values(self) -> bool:
        """Whether any candidate may change values."""
        return any(candidate.changes_values for candidate in self.candidates)


def _pick_error(expected: str, actual: object) -> UsageError:
    return UsageError(f"expected {expected}, found {actual!r}", rule="recipe.pick")
