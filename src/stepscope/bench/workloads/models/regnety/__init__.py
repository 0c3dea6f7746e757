"""RegNet-Y, eight sizes (Radosavovic et al., 2020)."""
