"""Squish directories: tiers, their choice and their state; four-bit forms."""
