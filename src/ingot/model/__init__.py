"""What a compressed tensor is, in every container: byte sources, parts, tensors, checkpoints."""
