"""``spec/astc.md``. The blocks themselves are decoded by the package ``astc_encoder``, Arm's own coder."""

from __future__ import annotations

from typing import Any

import numpy as np

from .common import Array, Stored, require_range


def astc(tensor: Stored, target: str) -> Array:
    import astc_encoder as package

    coder: Any = package
    rows, cols = tensor.matrix
    scale, zero = tensor.wide("scales")[0], tensor.wide("zeros")[0]
    texels = np.zeros((rows, cols), np.float32)
    if texels.size:
        width, height = (int(text) for text in tensor.params["footprint"].split("x"))
        flags = int(coder.ASTCConfigFlags.DECOMPRESS_ONLY)
        context = coder.ASTCContext(coder.ASTCConfig(coder.ASTCProfile.LDR, width, height, 1, 0.0, flags))
        empty = coder.ASTCImage(coder.ASTCType.F16, cols, rows, 1)
        image = context.decompress(tensor.parts["blocks"][1], empty, coder.ASTCSwizzle.from_str("rgba"))
        texels = np.frombuffer(image.data, np.float16).reshape(rows, cols, 4)[:, :, 0].astype(np.float32)
    with np.errstate(all="ignore"):
        values = texels * scale + zero
    require_range(values, np.isfinite(texels), target)
    return values.reshape(tensor.shape)
