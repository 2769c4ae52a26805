"""Conversion of NumPy arrays to ``jax.Array``."""

from __future__ import annotations

from typing import Any

from ingot.core.border import require
from ingot.core.numeric.dtypes import native_order
from ingot.errors import UnsupportedError
from ingot.model.tensor import Array


def from_numpy(array: Array, device: Any = None) -> Any:
    """Return a ``jax.Array`` of the same values and element type.

    Parameters
    ----------
    device : optional
        A ``jax.Device`` or sharding, or the name of a platform (``"cpu"``), which means the platform's first device.
        The default is JAX's default device.

    Raises
    ------
    UnsupportedError
        ``adapter.dtype``: JAX would narrow 64-bit values (set ``jax_enable_x64`` to prevent it), or the installed JAX
        does not have the element type.
    """
    jax = require("jax", "jax")

    array = native_order(array)
    target = jax.devices(device)[0] if isinstance(device, str) else device
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        raise UnsupportedError(
            f"JAX would narrow {array.dtype} values: call jax.config.update('jax_enable_x64', True) first",
            rule="adapter.dtype",
        )
    try:
        return jax.device_put(array, target)
    except TypeError as error:
        raise UnsupportedError(
            f"JAX {jax.__version__} has no arrays of {array.dtype}: take another dtype, or a newer JAX",
            rule="adapter.dtype",
        ) from error
