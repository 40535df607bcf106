"""What causal_conv does for a row as a whole: its snapshots, its first outputs and its new state."""
