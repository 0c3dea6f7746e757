"""One step of one rank: where its time went."""
