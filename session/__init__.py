"""What a worker and the cache service say to each other: the words, their wire format, and the limits of both.

A leaf: it imports protos and nothing else of ours, and neither service imports the other through it.
"""
