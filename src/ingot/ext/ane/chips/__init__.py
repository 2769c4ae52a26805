"""Properties of the Neural Engine's chips, with the evidence for each, and computations with them."""
