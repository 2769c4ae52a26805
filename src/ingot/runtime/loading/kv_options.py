"""Options of KV caches (``spec/kv-cache.md``). The command line imports this module, so it imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import gcd
from typing import Any, Final

from ingot.core.registry import did_you_mean
from ingot.errors import UsageError
from ingot.reporting.report import Bytes

VARIANTS: Final = {"int8": (8, 64, 64), "int4": (4, 64, 64), "kivi2": (2, 32, 128)}
"""For each kind: the number of bits of a code, of tokens of a block, and of tokens of the window."""
OBSERVED = 32
"""Tokens at the end of a prompt whose attention selects the tokens to keep (SnapKV)."""

_MULTIPLE = 16
_MAX_TOKENS = 1024
_MAX_LENGTH = 1 << 24


@dataclass(frozen=True, slots=True)
class KvUse:
    """The memory that a KV cache takes.

    ``kind`` is the kind of the cache with its options. ``tokens`` is the number of tokens per sequence. ``nbytes`` is
    the size of the cache in bytes, and ``full_nbytes`` the size of an unpacked cache with the same tokens.
    """

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
        Minimum number of latest tokens in full precision; by default 64, for kivi2 128.
    block : int, optional
        Tokens that are packed together, a multiple of 16 up to 1024; by default 64, for kivi2 32.
    group : int
        Channels of a value that share a scale, a multiple of 16.
    sinks : int
        Number of first tokens that stay in full precision.
    evict : int, optional
        Number of tokens per head that SnapKV keeps of a longer prompt; by default all.

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
        if not isinstance(self.kind, str) or self.kind not in VARIANTS:
            raise UsageError(
                f"expected a KV cache of kind {', '.join(VARIANTS)}, found {self.kind!r:.80}", rule="kv.option"
            )
        _, block, window = VARIANTS[self.kind]
        object.__setattr__(self, "window", window if self.window is None else self.window)
        object.__setattr__(self, "block", block if self.block is None else self.block)
        min_evicted = self.sinks + OBSERVED + 1 if isinstance(self.sinks, int) else 0
        for name, low, high, step in (
            ("window", 0, _MAX_LENGTH, 1),
            ("block", _MULTIPLE, _MAX_TOKENS, _MULTIPLE),
            ("group", _MULTIPLE, _MAX_TOKENS, _MULTIPLE),
            ("sinks", 0, _MAX_TOKENS, 1),
            ("evict", min_evicted, _MAX_LENGTH, 1),
        ):
            value = getattr(self, name)
            if value is None:
                continue
            is_integer = isinstance(value, int) and not isinstance(value, bool)
            if not is_integer or not low <= value <= high or value % step:
                multiple = "" if step == 1 else f", a multiple of {step}"
                raise UsageError(
                    f"expected {name} of a KV cache from {low} to {high}{multiple}, found {value!r:.80}",
                    rule="kv.option",
                )

    @property
    def bits(self) -> int:
        """The number of bits of a code."""
        return VARIANTS[self.kind][0]

    @property
    def tokens(self) -> int:
        """The number of tokens that are packed together: ``block``."""
        assert self.block is not None
        return self.block

    @property
    def latest(self) -> int:
        """The smallest number of latest tokens that stay unpacked: ``window``."""
        assert self.window is not None
        return self.window

    @property
    def step(self) -> int:
        """The number of tokens after the sinks that one call may read with the same result as one token at a time."""
        return gcd(self.tokens, self.latest)

    def text(self) -> str:
        """Return text that ``kv_cache`` parses to these settings: the kind and the options other than its defaults."""
        plain = KvCache(self.kind)
        more = (item.name for item in fields(self) if getattr(self, item.name) != getattr(plain, item.name))
        return ",".join([self.kind, *(f"{name}={getattr(self, name)}" for name in more)])


def kv_cache(settings: Any) -> KvCache | None:
    """Return the settings of a cache from a ``KvCache``, a mapping, or text such as ``int4,window=128,evict=1024``.

    Raises
    ------
    UsageError
        ``kv.option``.
    """
    if settings is None or isinstance(settings, KvCache):
        return settings
    if isinstance(settings, str):
        variant, *texts = settings.split(",")
        return _from_mapping({"kind": variant} | dict(map(_parse_option, texts)))
    if isinstance(settings, Mapping):
        return _from_mapping(settings)
    raise UsageError(
        f"expected a KV cache of kind {', '.join(VARIANTS)}, or a mapping with a kind, found {type(settings).__name__}",
        rule="kv.option",
    )


def _from_mapping(named: Mapping[str, Any]) -> KvCache:
    options = [item.name for item in fields(KvCache)]
    for name in named:
        if name not in options:
            raise UsageError(
                f"unknown option {name!r:.80} of a KV cache{did_you_mean(str(name), options)}: expected "
                f"{', '.join(options)}",
                rule="kv.option",
            )
    return KvCache(**named)


def _parse_option(text: str) -> tuple[str, int]:
    name, equals, value = text.partition("=")
    if not equals or not value.isascii() or not value.isdigit() or len(value) > len(str(_MAX_LENGTH)):
        raise UsageError(f"expected NAME=NUMBER after the kind of a KV cache, found {text!r:.80}", rule="kv.option")
    return name, int(value)
