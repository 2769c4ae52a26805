"""Access to the native core, which only this module imports.

There is no silent fallback to slow code: without the extension this import fails, and ``ingot doctor`` reports why.
"""

from __future__ import annotations

from ingot.errors import DISTRIBUTION

try:
    from ingot import _native
except ImportError as error:  # for example in a source tree that was not built
    raise ImportError(
        "Ingot's native core is not built for this Python. In a source tree run `make`; else reinstall the package "
        f"(`pip install --force-reinstall {DISTRIBUTION}`). The import failed with: {error}"
    ) from error

cbor_dumps = _native.cbor_dumps
cbor_loads = _native.cbor_loads
crc32c = _native.crc32c
crc32c_combine = _native.crc32c_combine
fnv1a64 = _native.fnv1a64
available_isas = _native.available_isas
isa = _native.isa
set_isa = _native.set_isa
table_cbor = _native.table_cbor
kernels = _native

__all__ = [
    "available_isas",
    "cbor_dumps",
    "cbor_loads",
    "crc32c",
    "crc32c_combine",
    "fnv1a64",
    "isa",
    "kernels",
    "set_isa",
    "table_cbor",
]
