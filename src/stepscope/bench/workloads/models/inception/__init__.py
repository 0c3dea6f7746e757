"""Inception v3 (Szegedy et al., 2015)."""
