"""Programs as users write them, each run plain, with shardwise and with FSDP2, and compared.

In reading order: ``engines`` (the three ways to run a program), ``nets`` (small models and
batches), ``loops``, ``values``, ``changes`` and ``models`` (the programs), ``run`` (every program
under every engine, in processes that are replaced when one ends badly), ``report`` and ``table``.
"""
