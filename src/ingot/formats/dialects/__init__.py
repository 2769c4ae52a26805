"""Packed folder formats: safetensors that other programs packed, as their ``config.json`` describes."""
