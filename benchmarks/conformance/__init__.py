"""Whether an engine gives the same tokens with the host tier under it, and hits what it should, by its command line."""
