"""Hugging Face folders of quantized weights, one module per quantization method."""
