"""How keys and values are cached (``spec/kv-cache.md``). The command line asks it: nothing heavy may be imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import gcd
from typing import Any, Final

from ingot.core.registry import did_you_mean
from ingot.errors import UsageError
from ingot.reporting.report import Bytes

KINDS: Final = {"int8": (8, 64, 64), "int4": (4, 64, 64), "kivi2": (2, 32, 128)}
"""Bits, tokens of a block and tokens of the window of each kind."""
OBSERVED = 32
"""Tokens at the end of a prompt whose attention says what of it is kept (SnapKV)."""

_SIXTEENS = 16
_MOST = 1024
_LONGEST = 1 << 24


@dataclass(frozen=True, slots=True)
class KvUse:
    """Memory that a cache takes: ``kind`` with its options, tokens per sequence, bytes, and bytes of a full cache."""

    kind: str
    tokens: int
    nbytes: Bytes
    full_nbytes: Bytes
    bytes_per_token: float
    full_bytes_per_token: float


@dataclass(frozen=True, slots=True)
class KvCache:
    """A cache of keys and values in packed blocks.

    Parameters
    ----------
    kind : 'int8', 'int4' or 'kivi2'
        Bits of a code: 8, 4 or 2.
    window : int, optional
        So many of the latest tokens, at least, stay in full precision; by default 64, of kivi2 128.
    block : int, optional
        Tokens that are packed together, in sixteens up to 1024; by default 64, of kivi2 32.
    group : int
        Channels of a value that share a scale, in sixteens.
    sinks : int
        So many of the first tokens stay in full precision.
    evict : int, optional
        Of a longer prompt so many tokens are kept in each head, as SnapKV chooses them; by default all.

    Raises
    ------
    UsageError
        ``kv.option``.
    """

    kind: str = "int4"
    window: int | None = None
    block: int | None = None
    group: int = 32
    sinks: int = 4
    evict: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise UsageError(
                f"expected a KV cache of kind {', '.join(KINDS)}, found {self.kind!r:.80}", rule="kv.option"
            )
        _, block, window = KINDS[self.kind]
        object.__setattr__(self, "window", window if self.window is None else self.window)
        object.__setattr__(self, "block", block if self.block is None else self.block)
        least = self.sinks + OBSERVED + 1 if isinstance(self.sinks, int) else 0
        for name, low, high, step in (
            ("window", 0, _LONGEST, 1),
            ("block", _SIXTEENS, _MOST, _SIXTEENS),
            ("group", _SIXTEENS, _MOST, _SIXTEENS),
            ("sinks", 0, _MOST, 1),
            ("evict", least, _LONGEST, 1),
        ):
            value = getattr(self, name)
            if value is None:
                continue
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or not low <= value <= high or value % step:
                multiple = "" if step == 1 else f", a multiple of {step}"
                raise UsageError(
                    f"expected {name} of a KV cache from {low} to {high}{multiple}, found {value!r:.80}",
                    rule="kv.option",
                )

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return KINDS[self.kind][0]

    @property
    def tokens(self) -> int:
        """Tokens of a block."""
        assert self.block is not None
        return self.block

    @property
    def latest(self) -> int:
        """Tokens at the end that are never packed."""
        assert self.window is not None
        return self.window

    @property
    def step(self) -> int:
        """Tokens that can be read at a time behind the sinks, so that each finds packed what it would find alone."""
        return gcd(self.tokens, self.latest)

    def text(self) -> str:
        """Return what ``kv_cache`` reads as the same: the kind, and what is not its own."""
        plain = KvCache(self.kind)
        more = (item.name for item in fields(self) if getattr(self, item.name) != getattr(plain, item.name))
        return ",".join([self.kind, *(f"{name}={getattr(self, name)}" for name in more)])


def kv_cache(given: Any) -> KvCache | None:
    """Return a cache's settings: as they are, of a mapping of their names, or of text: ``int4,window=128,evict=1024``.

    Raises
    ------
    UsageError
        ``kv.option``.
    """
    if given is None or isinstance(given, KvCache):
        return given
    if isinstance(given, str):
        kind, *texts = given.split(",")
        return _made({"kind": kind} | dict(map(_number, texts)))
    if isinstance(given, Mapping):
        return _made(given)
    raise UsageError(
        f"expected a KV cache of kind {', '.join(KINDS)}, or a mapping with a kind, found {type(given).__name__}",
        rule="kv.option",
    )


def _made(named: Mapping[str, Any]) -> KvCache:
    known = [item.name for item in fields(KvCache)]
    for name in named:
        if name not in known:
            raise UsageError(
                f"unknown option {name!r:.80} of a KV cache{did_you_mean(str(name), known)}: expected "
                f"{', '.join(known)}",
                rule="kv.option",
            )
    return KvCache(**named)


def _number(text: str) -> tuple[str, int]:
    name, equals, value = text.partition("=")
    if not equals or not value.isascii() or not value.isdigit() or len(value) > len(str(_LONGEST)):
        raise UsageError(f"expected NAME=NUMBER behind the kind of a KV cache, found {text!r:.80}", rule="kv.option")
    return name, int(value)
