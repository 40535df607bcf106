"""Reading and writing of the host tier's values, and the client of HostTier for other projects' engines.

Stands on protos and the session's words only, and needs no torch: workers and adapters share it.
"""
