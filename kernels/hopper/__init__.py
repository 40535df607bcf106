"""What the Gluon kernels for Hopper share.

Work queues, barriers, launches that overlap, opaque registers, cleared tails, and attention over gathered keys.
"""
