"""GGUF, the files of llama.cpp: read only (``spec/gguf.md``)."""
