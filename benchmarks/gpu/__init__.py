"""One rank of a large group on one CUDA device, side by side with FSDP2: a README.

Run it
    ``python -m benchmarks gpu --json gpu.json --plot gpu.png``

    Blocks of an 8B model and a launch-bound 124M model, worlds 8 and 64, every engine: about a
    quarter of an hour on one H100 or H200. ``--world 8 --model small125m`` takes a part of it: the
    four parts need about the same time. ``--bandwidth 0`` takes the link away and leaves what an
    engine costs by itself. One line per engine goes to the terminal, all numbers go to the JSON
    file. The report is written after every engine, so a run that is cut short keeps what it has;
    an engine that fails has a line that says why.

What is real
    Rank 0 of torch's fake process group runs both engines' own code: their streams, events,
    allocations and copies, and their host time down to ``torch.distributed``'s calls. Ours runs
    over ``BackendComm``, which is what runs over NCCL.

What is simulated
    The collectives (``simulated.py``): each takes as long as an assumed link needs for its bytes,
    one after the other, ordered on streams as ``ProcessGroupNCCL`` orders them. The link is the
    same for both engines. NCCL's use of multiprocessors and its own host time are missing on both
    sides. Peers hold what this rank holds, so losses are finite, and mean nothing.

What is measured
    ``alone``: each engine in a process of its own: memory between steps, peak in use, peak
    reserved; kernels, calls and bytes of copies by side (``copies.py``); on the timeline, how
    much of the collectives' time lies beside computation (``timeline.py``).
    ``time``: engines in one process, in turn, laps of three steps; medians of paired quotients.
    Where they do not fit together (known from ``alone``), processes take turns instead.

Targets
    Step at most 0.9 × and peak memory at most 0.8 × FSDP2's; no copy of parameters beyond the own
    slice. The report ends each model with what was missed.

Without a GPU
    It says so and measures nothing. ``--device cpu --model tiny --world 8 --rounds 4`` runs all of
    it on the CPU, where operations stand for kernels and times mean nothing; bytes, copies and
    memory in use are those of the same code. Nothing here has run on a GPU yet.

Everything that wants a GPU, in one line
    ``python -m pytest -W default -m gpu tests/comm/test_backend.py tests/parity/test_devices.py
    tests/benchmarks/test_gpu.py && python -m benchmarks gpu --json gpu.json --plot gpu.png``

    The tests: NCCL takes every call of the engine; one rank trains as a plain model does; peers
    that answer late change no number (a read or a reuse of memory that did not wait would); this
    benchmark itself. Where a machine is lent for ten minutes at a time, one ``--world`` a time.
"""
