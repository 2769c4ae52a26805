"""Choose the types of all tensors for a size, or for an error limit."""
