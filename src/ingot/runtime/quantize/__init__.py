"""``ingot quantize``: from a checkpoint and a program to files that the program runs, in one call."""
