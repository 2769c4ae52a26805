"""Copying models to registries and to the Hub, and from registries."""
