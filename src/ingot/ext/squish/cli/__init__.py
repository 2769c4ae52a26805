"""Commands of Squish directories."""
