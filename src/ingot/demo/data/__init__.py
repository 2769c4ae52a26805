"""A small language model, its tokenizer, and a text that the model was not trained on."""
