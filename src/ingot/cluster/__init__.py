"""Run the steps of a plan on many workers: tasks, their results, and the transfer of results into the artifact."""
