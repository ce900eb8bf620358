"""A device that is not there: its streams, its memory and its collectives, kept in order by clocks.

    clocks       streams and events; what a stream has been given and has not done
    accesses     who reads, writes and frees which memory, and what it has not waited for
    allocator    memory as torch's allocator rounds it
    overlap      collectives, and the units that are computed beside them
    device       the modes and stand-ins under which a program runs as if on a device
    collectives  a vendor's group of which one rank is there; it writes late
    fully_shard  FSDP2 on such a device
    programs     small training runs, and what they are compared with

Tensors are the CPU's. What a stream beside the one that computes is given is done only when
something waits for it, and until then its output is poisoned: so a wait that is missing is found
twice, by the clocks and by the numbers.
"""
