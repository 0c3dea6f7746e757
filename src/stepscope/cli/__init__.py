"""One file a verb: it parses, calls what the Python API exposes, renders."""
