"""What measurements and traces say: where a step went, what its path is, what changed, which rank or link is slow."""
