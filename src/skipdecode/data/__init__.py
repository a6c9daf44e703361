"""Text in, text out: prompts from files, generated in length-sorted batches, written in input order and resumably."""
