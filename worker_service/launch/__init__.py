"""Runs launches in a thread of their own, and a failed batch in parts, so that a row that fails, fails alone."""
