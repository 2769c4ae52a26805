"""The example of docs/developing/plugin.md: a codec, a format and a command for Ingot."""
