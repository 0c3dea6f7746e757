"""Verdicts between runs, gates for CI, and the sentences that tell them."""
