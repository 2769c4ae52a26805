"""Read and write kernel units of the Neural Engine, and folders of units as `ingot kernel` writes them
(spec/ane-kernels.md)."""
