"""Convert to ONNX models: replace the weights of a graph."""
