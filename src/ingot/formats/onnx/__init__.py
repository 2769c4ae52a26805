"""ONNX models, whose constants are read as tensors and written back into the graph."""
