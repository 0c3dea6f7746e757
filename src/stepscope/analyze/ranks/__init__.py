"""What the ranks of a run say together: collectives matched, waiting told from moving data, clocks, stragglers."""
