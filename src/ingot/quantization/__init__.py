"""Round matrices under statistics."""
