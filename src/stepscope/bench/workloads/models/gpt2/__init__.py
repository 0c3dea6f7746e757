"""GPT-2: learned positions, layer norms, tied embeddings."""
