"""The trainer: reads a recipe, writes a trained model. Emits records, prints nothing.

In reading order:

    corpus        files → documents → two splits     tokenizer     documents → ids
    data          both, read once by rank 0          batches       ids → rows → batches of each rank
    streamed_text documents, read while training     streams       the same batches from streams
    decoder       the model                          learning_rate step → learning rate
    job           model, shards, optimizer: one step loop          all steps
    length        epochs as steps                    results       what a finished run writes
    rehearsal     a recipe in small, and its proof   rehearsal_files what it reads
    validation    the same rows at every world size  sample        text from a sharded model
    start         new, resumed or finished           requests      to save or to stop
    checkpoints   saving and resuming                run_logger    rank 0's folder, log and output
    records       what a run reports                 metrics_log   metrics.jsonl
    throughput    tokens per second, and memory      plot          loss.png
    folder        the run's folder                   footprint     bytes on each rank
    hf_config     config files for transformers      collectives   broadcasts and gathers of values
"""
