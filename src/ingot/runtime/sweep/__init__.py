"""Sweeps: a model quantized with several presets, each measured on the same texts (``spec/evaluation.md``)."""
