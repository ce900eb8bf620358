"""Ways for ranks to exchange bytes: one protocol, and its implementations side by side.

In reading order: ``protocol`` (what the engine sees), ``reduction`` (sums over ranks),
``local`` and ``fake`` (no peers), ``desync`` (when ranks differ, and the sentences that say so),
``transport`` (what transports between real ranks have in common), ``messages`` (collectives as
messages), ``threads`` and ``gloo`` (what carries the messages), ``arena`` and ``shared_memory``
(ranks of one host that map the same memory), ``backend`` (the collectives of NCCL, XCCL and HCCL),
``memory`` (where tensors lie), ``malloc`` (freed memory that stays mapped), ``watchdog`` (no wait
without end or explanation), ``environment`` (the launcher's variables), ``connect`` (chooses).
"""
