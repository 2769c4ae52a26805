"""Open and save checkpoints: destinations, companion files, attachments and content ids."""
