"""The safetensors format: single files, and shards under an index (spec/safetensors.md)."""
