"""Core ML packages: constants of an ML program in and out, still compressed (spec/coreml.md)."""
