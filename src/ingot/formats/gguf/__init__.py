"""GGUF, the files of llama.cpp (``spec/gguf.md``)."""
