"""Runtime profiles: data that states what programs accept, and the checks that read the data."""
