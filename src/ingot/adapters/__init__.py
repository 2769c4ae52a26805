"""Frameworks: the only places that import torch, mlx or jax."""
