"""BERT, base and large: pre-training and question answering."""
