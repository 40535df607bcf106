"""linear in fp32 on CUDA: exact multiply-adds, the depth cut into slices at fixed places."""
