"""XLM-R Large as a feature extractor."""
