"""From files to token ids: records, prompts, chats and tasks, and batches with aligned responses."""
