"""What the encoder transformers of the suite share: synthetic text, and the fast form of their layers."""
