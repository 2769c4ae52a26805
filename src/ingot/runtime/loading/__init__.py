"""Load checkpoints into transformers and MLX."""
