"""From requests to text: the one loop that `LLM`, the verbs and the server use, its records and its statistics."""
