"""Nsight Systems: SQLite exports and tables of `nsys stats`."""
