"""The frozen target model.

- target.py: `Target`, what the rest of the project uses (hidden states, logits), and `load_target`
- pretrained.py: opens the model with transformers; probe.py: checks at load that our view of it is right
- architecture.py: which architectures can be targets, told by the configuration alone
- taken.py: what of a checkpoint the model took, and which quantized formats are read
- identity.py: what distinguishes a target from others, and how two differ; built from files.py (weights, configuration,
  tokenizer and chat template as hashes)
- tokens.py: whether two models have the same token ids, and which token serves as a mask
- tuned.py: a target that a LoRA adapter tunes; shape.py: what a target costs, from its configuration alone
"""
