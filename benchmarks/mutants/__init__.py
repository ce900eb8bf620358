"""Random small mistakes in the engine's code, and whether the tests of their folder notice them."""
