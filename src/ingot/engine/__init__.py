"""Carrying out a plan: read, work on several threads, write, in order and within a budget."""
