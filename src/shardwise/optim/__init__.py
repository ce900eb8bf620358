"""What happens between the backward pass and the next step, on shards."""
