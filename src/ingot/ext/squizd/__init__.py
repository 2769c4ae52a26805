"""SQUIZD files: container, directory, attachments and kernel stacks."""
