"""Chakra execution traces: their schema, their files, the timeline they hold."""
