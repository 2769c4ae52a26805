"""Adapters of models: LoRA, rsLoRA and DoRA of PEFT, and their GGUF and MLX forms (``spec/adapters.md``)."""
