"""The ``.wdelta`` format, versions 1 and 2 (spec/wdelta.md)."""
