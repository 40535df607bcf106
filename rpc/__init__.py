"""What both services need to speak gRPC: server, channel, interceptors, health, logs, settings, metrics endpoint.

Knows no service of ours and no domain word; services hand in their servicers, error tables and settings classes.
"""
