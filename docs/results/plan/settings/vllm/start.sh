vllm serve embedded --speculative-config '{"method": "eagle3", "model": "export/eagle3", "num_speculative_tokens": 7, "num_speculative_tokens_per_batch_size": [[1, 1, 7], [2, 8, 4]]}'
