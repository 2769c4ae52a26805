"""Hugging Face folders of quantized weights; each module reads the folders of one quantization program."""
