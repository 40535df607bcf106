"""The calls that clients make: messages decoded and encoded, texts made tokens."""
