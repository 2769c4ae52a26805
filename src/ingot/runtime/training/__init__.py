"""Saving of the steps of a training run."""
