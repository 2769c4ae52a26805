"""Adapters of models: LoRA, rsLoRA and DoRA, stored as PEFT, GGUF or MLX files (``spec/adapters.md``)."""
