"""Commands of the Neural Engine."""
