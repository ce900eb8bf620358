"""Libraries that users have already: each file is for one of them."""
