"""Read tensors: ranges, slices, lazy mappings, limits."""
