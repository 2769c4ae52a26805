"""Object stores, web servers and the Hugging Face Hub: bytes asked for by ranges, of one version of a file."""
