"""One rank of a large group on one CUDA device, side by side with FSDP2: a README.

Run it: ``python -m benchmarks gpu --json gpu.json --plot gpu.png``
    Blocks of an 8B model and a launch-bound 124M model, worlds 8 and 64, every engine. The report
    is written after every engine, so a run that is cut short keeps what it has; an engine that
    fails has a line that says why. ``--world 8 --model small125m`` takes a part of it;
    ``--bandwidth 0`` takes the link away and leaves what an engine costs by itself.

Real: rank 0 of torch's fake process group runs both engines' own code, their streams, events,
    allocations and copies, and their host time down to ``torch.distributed``'s calls. Ours runs
    over ``BackendComm``, which is what runs over NCCL.

Simulated: the collectives (``simulated.py``). Each takes as long as an assumed link needs for its
    bytes, ordered on streams as ``ProcessGroupNCCL`` orders them, the same for both engines.
    NCCL's use of multiprocessors and its host time are missing on both sides.

Measured ``alone``, each engine in a process of its own: memory between steps, in use and reserved;
    copies by side (``copies.py``). By ``time``: engines in one process, in turn, laps of three
    steps, over the link and over one that takes no time: what of the link's time is hidden.

Targets: step at most 0.9 × and peak memory at most 0.8 × FSDP2's; no copy of parameters beyond the
    own slice. The report ends each model with what was missed.

Without a GPU it measures nothing. ``--device cpu --model tiny --world 8 --rounds 4`` tries it on
    the CPU, where times mean nothing. Nothing has run on a GPU yet; what wants one: ``python -m
    pytest -W default -m gpu tests/comm/transports/test_backend.py tests/parity/test_devices.py
    tests/benchmarks/test_gpu.py``.
"""
