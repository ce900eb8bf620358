"""What the user's code does, as cues, and the events that answer them, carried out."""
