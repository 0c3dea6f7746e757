"""What the numbers of a job say, in sentences."""
