"""Which tiles a persistent program computes, and which keys a tile sees; see `kernel`."""
