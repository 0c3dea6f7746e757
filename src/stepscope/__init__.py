"""Stepscope."""
