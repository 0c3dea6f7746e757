"""Records of what memory held: torch.profiler's memory timelines and snapshots of the CUDA allocator."""
