"""Language models of ``transformers`` with adapters of ``peft``, sharded."""
