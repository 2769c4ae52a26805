"""What a Neural Engine makes of weights."""
