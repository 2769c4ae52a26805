"""Views: checkpoints made of checkpoints, lazily and exactly; users know them as ``ingot.views``."""
