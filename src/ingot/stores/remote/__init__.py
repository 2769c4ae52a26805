"""Stores on other machines: object stores, web servers and the Hugging Face Hub. Files are read by ranges of one
version.
"""
