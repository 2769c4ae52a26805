"""A library stores many checkpoints and each of their tensors once."""
