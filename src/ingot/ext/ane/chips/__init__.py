"""Facts about chips, with the evidence for each."""
