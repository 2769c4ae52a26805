"""Struct types of msgspec that several threads may use at once."""

from __future__ import annotations

from typing import TypeVar

import msgspec

Kind = TypeVar("Kind", bound=type[msgspec.Struct])

WARM: list[type[msgspec.Struct]] = []
"""Every Struct type of Ingot."""


def warm(kind: Kind) -> Kind:
    """Let msgspec describe a Struct type at once, while its module is imported by one thread.

    msgspec does so when a type is first decoded or converted, without a lock: threads that meet there may crash.
    """
    msgspec.json.Decoder(kind)
    WARM.append(kind)
    return kind
