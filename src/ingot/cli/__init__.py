"""The command line: each module defines one command, or a few related commands."""
