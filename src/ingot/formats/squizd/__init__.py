"""SQUIZD (``.squizd``), version 1. Byte layout, rules by name and decisions: ``spec/squizd.md``."""
