"""The operation ``ingot quantize``: turn a checkpoint into files that a program runs."""
