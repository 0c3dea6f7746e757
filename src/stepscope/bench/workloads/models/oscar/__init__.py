"""OSCAR: a BERT encoder over text, object tags and image regions; visual question answering."""
