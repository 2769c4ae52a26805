"""Convert to ONNX models: put weights into a graph."""
