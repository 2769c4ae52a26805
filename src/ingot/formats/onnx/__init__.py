"""ONNX models: constants of a graph are read as tensors, and written back into the graph."""
