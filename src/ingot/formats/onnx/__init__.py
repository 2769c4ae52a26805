"""ONNX models: constants of a graph as tensors, and back into the graph."""
