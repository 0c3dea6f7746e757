"""Readers and writers of file formats, and the plain records (timeline, graph) that they give."""
