"""What users ask for: open, save, convert, verify, inspect, compare. Built from formats, codecs, stores and recipes."""
