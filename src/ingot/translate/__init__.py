"""Translation of model families: names, hyperparameters and tokenizers of Hugging Face, llama.cpp and MLX."""
