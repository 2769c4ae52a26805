"""Tensors as arrays of torch, MLX and JAX."""
