"""The frozen target model.

- target.py: `Target`, what the rest of the project uses (hidden states, logits), and `load_target`
- config.py: judges a checkpoint's configuration before weights are read; pretrained.py: opens the model with transformers and checks
  that it is taken whole and seen rightly; gguf_file.py: one of llama.cpp's files
- identity.py: what distinguishes a target from others, and how two differ, from the files of its folder, which folder.py reads
- tokens.py: whether two models have the same token ids, and which token serves as a mask
- layers.py: where the decoder layers are, in the modules and on GPUs; parts.py: a target without them, as a store knows it
- tuned.py: a target that a LoRA adapter tunes; shape.py: what a target costs, from its configuration alone
- kernels.py: what is computed faster than transformers does; plain_pass.py: a pass of Llama-like decoders without its bookkeeping
"""
