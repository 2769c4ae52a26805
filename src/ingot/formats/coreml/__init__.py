"""Core ML packages, whose constants are read and written in compressed form (spec/coreml.md)."""
