"""MLX folders: safetensors whose ``config.json`` says how layers are packed."""
