"""VGG-16 without batch norm (Simonyan and Zisserman, 2014)."""
