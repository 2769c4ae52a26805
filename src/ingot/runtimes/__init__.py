"""Runtime profiles, which state what programs accept, and the checks that use them."""
