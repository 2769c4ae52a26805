"""Recipes: ordered rules that choose a codec for each tensor."""
