"""CvT-13: convolutions and attention for image classification."""
