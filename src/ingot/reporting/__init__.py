"""Report data, and its rendering as text and HTML."""
