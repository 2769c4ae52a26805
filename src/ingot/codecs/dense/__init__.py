"""Values as they are."""
