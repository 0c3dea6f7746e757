"""What the encoder transformers of the suite share: synthetic text, and the optimized implementation of their
layers."""
