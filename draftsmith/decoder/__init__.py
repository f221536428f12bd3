"""The speculative decoder.

- decode.py: entry points; answers.py: requests, answers, acceptance counts
- loop.py: a round, propose -> one target pass -> verify -> commit -> emit
- cache.py: `KVCache`, where accepted paths are committed and tokens rolled back; masks
- slots.py: the target pass over a draft, and its attention on a GPU, by the same operations at every length; captured.py: passes as
  CUDA graphs
- draft.py: what a drafter reads and returns; trees.py, growth.py: shapes of draft trees, and how drafts grow
- verify.py, sampling.py: which tokens are accepted, and the random numbers for it
- selfcheck.py: whether a target can be decoded exactly
"""
