"""Quantizers that round matrices by calibration statistics: errors weigh as much as they change the model's outputs."""
