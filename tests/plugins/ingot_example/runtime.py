"""The profile of ``flatrun``, a program that runs ``.flat`` files."""

from __future__ import annotations

PROFILE = """
name = "flatrun"
title = "Flatrun"
version = "1.0"
date = "2026-11-28"
summary = "Files of the format flat."
containers = ["flat"]
commands = { default = ["flatrun {file}"] }

[[schemes]]
name = "dense"
containers = ["flat"]
storage = "dense"
types = ["f32"]
outcome = "documented"
"""


def profile(name: str) -> str:
    """Return the TOML text of the profile ``name``, which is the name of the entry point."""
    return PROFILE
