"""What the convolutional networks share: layers, images, and how they are made fast."""
