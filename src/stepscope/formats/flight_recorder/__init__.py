"""Flight-recorder dumps, read without trusting them."""
