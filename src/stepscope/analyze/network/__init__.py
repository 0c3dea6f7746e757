"""What measurements say together: which host, NIC, rank or link is slow."""

from stepscope.analyze.network.pair_matrix import (
    QUANTITIES,
    HostMatrix,
    Interval,
    PairFailure,
    PairMatrix,
    Quantity,
    by_host,
    find_pair,
    read_pair_matrices,
    read_pair_matrix,
)
from stepscope.analyze.network.pairs import Finding, find_outliers, pairs_to_dict

__all__ = [
    "QUANTITIES",
    "Finding",
    "HostMatrix",
    "Interval",
    "PairFailure",
    "PairMatrix",
    "Quantity",
    "by_host",
    "find_outliers",
    "find_pair",
    "pairs_to_dict",
    "read_pair_matrices",
    "read_pair_matrix",
]
