"""zTensor 1.2 (``.zt``), the container of this project. Byte layout, rules by name and decisions: ``spec/zt.md``."""
