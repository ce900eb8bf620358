"""Who holds which bytes: shards, full buckets, gradients, and the tensors that show them."""
