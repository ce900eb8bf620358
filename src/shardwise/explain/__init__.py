"""Words of the field, explained: texts, and numbers of two ranks that really do what they say."""
