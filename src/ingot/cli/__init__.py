"""The command line. Each module defines one or a few related commands."""
