"""Find the weakest blocks of feed-forward networks."""
