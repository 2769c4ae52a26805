"""The running process: threads, memory, instruction sets, progress."""
