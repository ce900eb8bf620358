"""A recipe: what a YAML file says in its sections, their checks, and how a file is read."""
