"""Models as Hugging Face and as llama.cpp name and lay them out (``spec/architectures.md``)."""
