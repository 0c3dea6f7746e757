"""Llama 3: rotary positions, grouped queries, gated feed-forward."""
