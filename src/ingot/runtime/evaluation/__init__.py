"""Measure models: perplexity, KL, agreement, generation."""
