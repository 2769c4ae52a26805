"""Codecs that store numbers in the blocks of other programs: ggml."""
