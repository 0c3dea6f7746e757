"""Loops that are compiled. These modules import numpy and numba at their top and are imported only inside functions."""
