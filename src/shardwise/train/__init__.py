"""The main job: a recipe in, a trained model out. Emits records, prints nothing.

In reading order:

    config      the typed tree                       recipe      a file and overrides → the tree
    corpus      files → documents → two splits       tokenizer   documents → ids
    data        the above, once, for all ranks       batches     ids → rows → who trains on which
    decoder     the model                            rates       step → learning rate
    job         model, shards, optimizer: one step   loop        all steps, and what remains
    validation  the same rows at every world size    sample      text from a sharded model
    metrics     records, and metrics.jsonl           plot        loss.png
    meter       speed and memory                     footprint   bytes on each rank
    folder      where it is all written              export      as transformers loads it
    exchange    small things that ranks tell each other
"""
