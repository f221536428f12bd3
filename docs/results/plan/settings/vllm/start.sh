vllm serve embedded --speculative-config '{"method": "eagle3", "model": "export/eagle3", "num_speculative_tokens": 5, "num_speculative_tokens_per_batch_size": [[1, 1, 5], [2, 8, 4]]}'
