"""The runtime: the user's code becomes cues, and the events that answer them are carried out."""
