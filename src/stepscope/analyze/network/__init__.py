"""What measurements say together: which host, NIC, rank or link is slow."""
