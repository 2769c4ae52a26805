"""A page that shows what a checkpoint is made of, and how far it is from another."""
