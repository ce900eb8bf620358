"""The main job: a recipe in, a trained model out. Emits records, prints nothing.

In reading order:

    config      the typed tree                       recipe      a file and overrides → the tree
    corpus      files → documents → two splits       tokenizer   documents → ids
    data        the above, once, for all ranks       batches     ids → rows → who trains on which
    decoder     the model                            rates       step → learning rate
    job         model, shards, optimizer: one step   loop        all steps, and what remains
    validation  the same rows at every world size    sample      text from a sharded model
    start       afresh, on, or not at all            requests    save, or stop, as asked
    checkpoints what is saved, and gone on from      desk        what rank 0 speaks through
    metrics     records                              journal     metrics.jsonl
    meter       speed and memory                     plot        loss.png
    folder      where it is all written              footprint   bytes on each rank
    export      as transformers loads it
    exchange    small things that ranks tell each other
"""
