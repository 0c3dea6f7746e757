"""Loops that are compiled. These modules are imported only inside functions."""
