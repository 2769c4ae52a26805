"""Conversion of decoded tensors to arrays of torch, MLX, JAX, NumPy and SciPy."""
