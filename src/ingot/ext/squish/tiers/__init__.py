"""Tiers: copies of a Squish directory's weights, prepared for runtimes; they are chosen, built and checked here."""
