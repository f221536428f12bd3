trtllm-serve embedded --extra_llm_api_options trtllm.yaml
