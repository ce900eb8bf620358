"""Unit → buckets → slots: which rank owns which range. Pure numbers, no torch."""
