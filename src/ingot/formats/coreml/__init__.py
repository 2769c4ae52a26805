"""Core ML packages: constants of an ML program are read and written in compressed form (spec/coreml.md)."""
