"""``python -m ingot``: the command line."""

from ingot.cli.entry import main

main()
