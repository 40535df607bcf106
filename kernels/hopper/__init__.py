"""What the Gluon kernels for Hopper share: work queues, barriers, opaque registers, cleared tails, gathered keys."""
