"""Stores: where bytes live."""
