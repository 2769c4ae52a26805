"""Files of the local system: atomic publishing, archives, memory maps."""
