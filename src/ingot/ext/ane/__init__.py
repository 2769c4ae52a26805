"""Apple's Neural Engine: plans, look-up tables, programs."""
