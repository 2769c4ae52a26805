"""Kernel units of the Neural Engine, and folders of them, as `ingot kernel` writes them (spec/ane-kernels.md)."""
