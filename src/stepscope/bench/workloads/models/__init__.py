"""The models of the suite: one package each, with `ootb` and `optimized`."""
