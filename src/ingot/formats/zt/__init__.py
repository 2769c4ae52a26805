"""zTensor 1.2 (``.zt``): our model's own container. Byte layout, rules by name and decisions: ``spec/zt.md``."""
