"""Squish directories: tiers, their cache and their quality gate."""
