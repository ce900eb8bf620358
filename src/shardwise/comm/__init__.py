"""Ways for ranks to exchange bytes: one protocol, and its implementations in ``transports``.

In reading order: ``protocol`` (what the engine sees), ``reduction`` (sums over ranks), ``codec``
(8-bit blocks), ``mesh`` (axes of a group), ``memory`` and ``host_memory`` (where tensors lie),
``pages`` (one frees, the next one fills), ``malloc``, ``garbage``; ``transports``: ``local``,
``fake`` (alone), ``transport`` (what transports between real ranks have in common), ``messages``
(collectives as messages), ``threads`` and ``gloo`` (what carries the messages), ``arena`` and
``shared_memory`` (ranks of one host that map the same memory), ``backend`` (the collectives of
NCCL, XCCL and HCCL); ``watchdog``: ``desync`` (when ranks differ, and the sentences that say so),
``call_site`` (in which line), ``watchdog`` (no wait without end or explanation); ``machine``:
``accelerators`` (a row for each kind of device), ``devices``, ``environment`` (the launcher's
variables), ``meeting`` (ranks find each other), ``connect`` (chooses).
"""
