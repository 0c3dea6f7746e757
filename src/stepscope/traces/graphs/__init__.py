"""Graphs of operators: execution traces, tensors, dependencies."""
