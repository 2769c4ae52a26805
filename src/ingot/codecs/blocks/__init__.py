"""Codecs whose numbers lie in blocks, as other programs keep them: ggml."""
