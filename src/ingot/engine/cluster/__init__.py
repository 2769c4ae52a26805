"""A plan's steps on many workers: tasks, what they leave, and how that gets into the result."""
