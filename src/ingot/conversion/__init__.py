"""Convert a checkpoint: prepare the source, plan, run and report."""
