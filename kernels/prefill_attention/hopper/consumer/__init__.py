"""What computes: products, softmax, and the store; see `kernel`."""
