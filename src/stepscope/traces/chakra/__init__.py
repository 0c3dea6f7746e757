"""Chakra files, both ways."""
