"""Run a plan's steps on many workers: tasks, their results, and how they get into the artifact."""
