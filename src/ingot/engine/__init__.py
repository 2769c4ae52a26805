"""Execution of a plan: read tensors, process them in several threads and write them in order, in limited memory."""
