"""What test suites of other libraries ask of a model and an optimizer, asked of ours."""
