"""Dialects of safetensors: folders in which other programs packed weights, as ``config.json`` says."""
