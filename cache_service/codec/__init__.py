"""Between protos/v1 and the core's words: `decode` checks and translates what comes in, `encode` what goes out.

Knows no manager: whether a sequence, a group or a page exists is not asked here.
"""
