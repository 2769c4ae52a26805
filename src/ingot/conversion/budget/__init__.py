"""The search of a recipe for a budget: a limit of the size, or of the divergence."""
