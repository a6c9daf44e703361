"""Text in, text out: prompts from files, generation in batches sorted by length, resumable output in input order."""
