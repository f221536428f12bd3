"""The speculative decoder: loop, KV cache, drafts, trees, verification, sampling."""
