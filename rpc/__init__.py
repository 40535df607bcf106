"""What both services need to speak gRPC: server, channel, interceptors, health, logs, settings, metrics endpoint.

Services hand in their servicers, error tables and settings classes.
"""
