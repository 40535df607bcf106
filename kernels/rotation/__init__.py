"""Rotary position embedding of rows, and the norm that comes before it: shared by the fused appends."""
