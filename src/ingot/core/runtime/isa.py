"""Which instruction set the kernels run with."""

from __future__ import annotations

from ingot.core.runtime import native

available_isas = native.available_isas
isa = native.isa
set_isa = native.set_isa

__all__ = ["available_isas", "isa", "set_isa"]
