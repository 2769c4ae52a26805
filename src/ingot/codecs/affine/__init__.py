"""The affine family: ``w = s * (q - z)`` or ``w = s * q + z``, in every layout of codes, scales and zero points."""
