"""Ways for ranks to talk: one protocol, and its implementations side by side."""
