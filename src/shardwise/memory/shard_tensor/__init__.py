"""A parameter and its gradient as torch's functions see them."""
