"""What fills shared memory: the copy engine's warp, and the warps that widen fp8 pages; see `kernel`."""
