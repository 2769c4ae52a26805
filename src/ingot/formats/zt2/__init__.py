"""zTensor container version 2 (``.zt``). Byte layout, rules by name and decisions: ``spec/zt2.md``."""
