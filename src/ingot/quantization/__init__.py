"""Quantizers that round matrices under calibration statistics, so that the model's outputs change little."""
