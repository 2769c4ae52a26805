"""Recipes: ordered rules that say which tensor gets which codec."""
