"""3D ResNeXt-101 over clips of video (Hara, Kataoka and Satoh, 2018)."""
