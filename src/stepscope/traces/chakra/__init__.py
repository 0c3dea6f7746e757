"""Linked timelines and graphs made into Chakra graphs, and Chakra graphs made into operator graphs."""
