"""DLRM: dense features and sparse ones from embedding tables, crossed by dot products, judged by a perceptron."""
