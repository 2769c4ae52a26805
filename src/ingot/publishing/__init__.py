"""Push models to registries and to the Hugging Face Hub, and pull them from registries."""
