"""Codecs for blocks of ggml."""
