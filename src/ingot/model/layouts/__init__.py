"""How a codec's numbers lie in a tensor's parts: one frozen value per family, read from and written to attributes."""
