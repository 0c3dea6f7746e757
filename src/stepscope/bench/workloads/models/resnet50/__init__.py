"""ResNet-50 v1.5 (He et al., 2015, with the stride in the 3×3 convolution)."""
