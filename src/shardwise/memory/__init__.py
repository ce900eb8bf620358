"""Memory of a rank: shards, full buckets, gradients, and the tensors that show them."""
