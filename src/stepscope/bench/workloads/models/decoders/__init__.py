"""What the decoders of the suite share: their data, the plain loop, the fast network."""
