"""What reads and writes the host tier's values, and the client of HostTier for engines that are no workers of ours.

Stands on protos and the session's words only, and needs no torch: workers and adapters share it.
"""
