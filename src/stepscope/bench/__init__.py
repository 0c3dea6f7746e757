"""Producers: each turns what is asked for into measured cases; none knows another."""
