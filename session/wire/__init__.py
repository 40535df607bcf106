"""The messages of a session between NamedTuples and protobuf, both directions side by side.

Decoding checks each field and raises InvalidInput or TooMany with the field's name. What it lets pass is well-formed;
whether a sequence, a group or a page exists is not asked here.
"""
