"""The model of compressed tensors that all containers share: byte sources, parts, tensors and checkpoints."""
