"""gated_delta_scan with a decay for each key channel."""
