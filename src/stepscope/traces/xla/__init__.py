"""Traces of XLA devices."""
