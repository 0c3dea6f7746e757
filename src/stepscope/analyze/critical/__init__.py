"""What decides how long a step takes: its dependency graph, the critical path through it, and what-if."""
