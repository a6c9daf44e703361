"""Models by name: local directories, hub ids, the embedded default, PEFT adapters."""
