"""Convert to Core ML packages."""
