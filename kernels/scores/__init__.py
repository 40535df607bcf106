"""Scores of tokens in jit functions: penalties, Gumbel noise, and fp32 numbers in the order of integers."""
