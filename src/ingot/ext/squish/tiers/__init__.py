"""The prepared forms (tiers) of a Squish directory: choose, build, verify."""
