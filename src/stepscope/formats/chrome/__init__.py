"""Writing Chrome traces that Perfetto opens."""
