draftsmith export --recipe recipe.yaml --export.layout eagle3_llama_cpp --gguf llama.cpp
llama-server -m model/SmolLM2-135M-Instruct.Q4_1.gguf -md export/eagle3_llama_cpp.gguf --spec-type draft-eagle3 --spec-draft-n-max 3
