"""Run models: code that needs torch, transformers, MLX, JAX or SciPy."""
