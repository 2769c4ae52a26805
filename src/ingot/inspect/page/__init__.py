"""The HTML page of ``ingot report``."""
