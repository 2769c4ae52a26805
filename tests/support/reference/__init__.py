"""NumPy references of the native kernels, equal to them bit for bit: slow, short, and written from the formulas."""
