"""Ways for ranks to talk: one protocol, and its implementations side by side.

In reading order: ``protocol`` (what the engine sees), ``disagree`` (when ranks differ, and how to
say so), ``local`` and ``fake`` (nobody to talk to), ``peers`` (collectives as messages),
``threads`` and ``process_group`` (what carries the messages), ``native`` (a vendor's own
collectives), ``watch`` (no wait without end or explanation), ``environment`` (what a launcher
says), ``connect`` (which of them it is).
"""
