"""From files to batches: sources, tokenizer, chats, shards, packing, order."""
