"""The plan of a model's step, as values: units, layout, schedule, buckets on paper, bytes."""
