"""Moves pages between a device and the host tier, as the cache service orders."""
